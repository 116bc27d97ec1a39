"""Reading of MMBench tables: prompts, images, variants, and messages about invalid rows."""

import csv
import io
from pathlib import Path

import pytest

from benchmark_files import MMBENCH_COLUMNS, make_circular_rows, make_mmbench_row, png_in_base64, write_mmbench
from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.features.challenge.benchmarks.mmbench import read as read_mmbench


def read(tmp_path: Path, rows: list[dict]) -> list[dict]:
    return list(read_mmbench(**write_mmbench(tmp_path / "mmbench.tsv", rows)))


def test_the_prompt_equals_that_of_llava(tmp_path):
    row = make_mmbench_row(3, hint="Look at the\nmiddle.", question='Which is "red"?', C="green\tgrass")
    assert read(tmp_path, [row])[0]["prompt"] == (
        'Look at the\nmiddle.\nWhich is "red"?\nA. blue\nB. red\nC. green\tgrass\n'
        "Answer with the option's letter from the given choices directly."
    )


def test_cells_with_nan_are_empty(tmp_path):
    row = read(tmp_path, [make_mmbench_row(3, hint="nan", C="nan", D="NaN")])[0]
    assert row["options"] == {"A": "blue", "B": "red"} and row["prompt"].startswith("What color")


def test_an_index_refers_to_the_image_of_that_row(tmp_path):
    rows = read(tmp_path, make_circular_rows())
    assert rows[2]["image"] is rows[0]["image"] and rows[3]["image"] is rows[1]["image"] != rows[0]["image"]
    assert load_image(io.BytesIO(rows[3]["image"])).getpixel((0, 0)) == (9, 9, 200)


def test_references_and_equal_bytes_count_as_one_image(tmp_path):
    other = png_in_base64((1, 2, 3))
    rows = [
        make_mmbench_row(7, image="9"),
        make_mmbench_row(8, image=other),
        make_mmbench_row(9),
        make_mmbench_row(10),
        make_mmbench_row(11),
    ]
    rows[-1]["image"] = other
    assert [row["image_id"] for row in read(tmp_path, rows)] == ["7", "8", "7", "7", "8"]


def test_a_reference_can_precede_its_image(tmp_path):
    rows = read(tmp_path, make_circular_rows()[::-1])
    assert all(isinstance(row["image"], bytes) for row in rows)


def test_the_variant_depends_on_rotated_options(tmp_path):
    assert {row["variant"] for row in read(tmp_path, make_circular_rows())} == {"circular"}
    assert {row["variant"] for row in read(tmp_path, make_circular_rows()[:2])} == {"single"}


def test_a_split_without_answers_is_read(tmp_path):
    rows = read(tmp_path, [make_mmbench_row(1, answer=""), make_mmbench_row(2, answer="")])
    assert [row["answer"] for row in rows] == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": "1"}, "id '1' is already the id of row 1"),
        ({"index": "two"}, "'index' must be a whole number, found 'two'"),
        ({"question": " "}, "'question' is empty"),
        ({"B": ""}, "two to four options without a gap, found A"),
        ({"C": "", "D": "green"}, "without a gap, found A, B, D"),
        ({"answer": "C"}, "'answer' must be one of the options A, B, found 'C'"),
        ({"answer": ""}, "'answer' must be given in all rows or in none"),
        ({"image": "99"}, "without an image of its own"),
        ({"image": "2"}, "without an image of its own"),
        ({"image": png_in_base64()[:72]}, "not a complete image in base64"),
        ({"image": "*" + png_in_base64()[1:]}, "not a complete image in base64"),
        ({"image": ""}, "not a complete image in base64"),
        ({"question": "What is <image> here?"}, "control token <image>"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_row_is_named(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, [make_mmbench_row(1), make_mmbench_row(2) | changes])
    assert "mmbench.tsv, row 2" in str(error.value)


@pytest.mark.parametrize("column", ["index", "A", "image"])
def test_a_missing_column_is_named(tmp_path, column):
    text = io.StringIO(newline="")
    table = csv.DictWriter(
        text, [c for c in MMBENCH_COLUMNS if c != column], dialect="excel-tab", extrasaction="ignore"
    )
    table.writeheader()
    table.writerow(make_mmbench_row(1))
    (tmp_path / "m.tsv").write_text(text.getvalue(), encoding="utf-8")
    with pytest.raises(InputError, match=f"the column '{column}' is missing"):
        list(read_mmbench(tmp_path / "m.tsv"))


def test_a_truncated_table_is_refused(tmp_path):
    write_mmbench(tmp_path / "m.tsv", [make_mmbench_row(1), make_mmbench_row(2)])
    whole = (tmp_path / "m.tsv").read_bytes()
    for end, message in (
        (-60, "row 2: the number of cells"),
        (whole.index(b"\n") + 1, "contains no questions"),
    ):
        (tmp_path / "m.tsv").write_bytes(whole[:end])
        with pytest.raises(InputError, match=message):
            list(read_mmbench(tmp_path / "m.tsv"))


def test_other_encodings_are_refused_by_row(tmp_path):
    write_mmbench(tmp_path / "m.tsv", [make_mmbench_row(1), make_mmbench_row(2, question="Où?")])
    (tmp_path / "m.tsv").write_bytes((tmp_path / "m.tsv").read_text(encoding="utf-8").encode("latin-1"))
    with pytest.raises(InputError, match="m.tsv, row .: not a tab-separated table in UTF-8"):
        list(read_mmbench(tmp_path / "m.tsv"))
