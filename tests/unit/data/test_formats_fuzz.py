"""Arbitrary contents of a user's file give unchanged rows, or one sentence that names the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from dj2mgm.data.formats import build_dj_text, read_evaluation, read_llava, read_pairs
from dj2mgm.data.images import HeldOutImages
from dj2mgm.data.training_jsonl import convert_pairs, write_training_jsonl
from dj2mgm.data.user_dataset import write_user_dataset
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import FilesDataset
from dj2mgm.storage import streaming
from dj2mgm.storage.files import read_jsonl, write_jsonl
from dj2mgm.storage.streaming import read_json_list
from fuzzing import fuzzed
from sample_rules import build_sample_rules

pytestmark = pytest.mark.fuzz  # for tests with a drawn inner function

TOKENS = ["<image>", "<__dj__image>", "<|__dj__eoc|>", "<start_of_turn>", "<|im_end|>", "</s>", "<|image_pad|>"]
PIECES = [*TOKENS, "a", " ", "\n", "\r", "\u2028", "\x00", "\\u", '"', "é", "🏔", "\ud800", "~2", "#2", "../", "."]
texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
HOSTILE = [None, True, 7, -0.5, 10**4299, float("nan"), float("inf"), "text", "\ud800", [], {}, {"\ud800": [1]}, ["a"]]
HOSTILE += [json.loads("[" * depth + "0" + "]" * depth) for depth in (90, 99, 120, 300)]
values = st.sampled_from(HOSTILE)

ids = st.sampled_from(["1", "2", "1~2", "1#2", "", 1, True, None]) | values
images = st.sampled_from(["a.png", "./a.png", "e.png", "none.png", "../x", "\x00"]) | values
turn = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]), "value": texts})
pair_texts = texts.map(build_dj_text) | texts
question_items = st.fixed_dictionaries({"type": texts, "question": texts, "answer": texts}) | values


def make_turns(texts_of_turns: list[str]) -> list[dict]:
    return [{"from": ("human", "gpt")[n % 2], "value": value} for n, value in enumerate(texts_of_turns)]


turns = st.lists(texts, min_size=2, max_size=4).map(make_turns) | st.lists(turn | values, max_size=4) | values


def rows_with(**keys: st.SearchStrategy) -> st.SearchStrategy[list]:
    """Draw a few rows with most of the keys, other keys, or none of them."""
    return st.lists(
        st.fixed_dictionaries(keys) | st.fixed_dictionaries({}, optional=keys | {"extra": values}) | values, max_size=3
    )


FORMATS = {
    "dj": (read_pairs, rows_with(id=ids, text=pair_texts | values, images=st.lists(images, max_size=1) | values)),
    "llava": (read_llava, rows_with(id=ids, image=images, conversations=turns)),
    "evaluation": (
        read_evaluation,
        rows_with(
            id=ids,
            image=images,
            captions=st.lists(texts, max_size=2) | values,
            questions=st.lists(question_items, max_size=2) | values,
        ),
    ),
}
encodings = st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"])
ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b""])


def encode_lines(rows: list, encoding: str, end: bytes, ascii_only: bool) -> bytes:
    """Draw a jsonl file in an encoding that may be wrong."""
    return b"".join(json.dumps(row, ensure_ascii=ascii_only).encode(encoding, "replace") + end for row in rows)


def outcome(reader: Callable, path: Path) -> list[dict] | None:
    """Return the rows, or None if a message that names the file refuses it; any other exception is a defect."""
    try:
        return list(reader(path))
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def as_written(rows: list[dict], content: bytes) -> bool:
    """Return whether rows equal the objects that `json` reads; `questions` and `objects` may be filled in.

    An empty list of images is read as none.
    """
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [json.loads(line.decode()) for line in lines if line.strip()]
    expected = [row | {"image": None} if isinstance(row, dict) and row.get("image") == [] else row for row in expected]
    filled = [{"objects": [], "questions": []} | row if "captions" in row else row for row in expected]
    return rows in (expected, filled)


@pytest.mark.parametrize("name", FORMATS)
def test_nearly_valid_rows_are_read_or_refused_by_name(name, folder):
    reader, rows = FORMATS[name]
    path = folder / f"{name}.jsonl"

    @fuzzed(900)
    @given(rows=rows, encoding=encodings, end=ends, ascii_only=st.booleans())
    def check(rows, encoding, end, ascii_only):
        content = encode_lines(rows, encoding, end, ascii_only)
        path.write_bytes(content)
        result = outcome(reader, path)
        assert result is None or as_written(result, content)

    check()


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_arbitrary_bytes_are_rows_or_refused_by_name(suffix, folder):
    path = folder / f"bytes.{suffix}"
    json_like = st.lists(st.sampled_from([*(bytes([byte]) for byte in b'{}[],:"1\\\n'), b'"id"', b"NaN"]))

    @fuzzed(900)
    @given(content=st.binary(max_size=40) | json_like.map(b"".join))
    @example(b"[" + b"9" * 5000 + b"]")
    @example(b"[" * 5000)
    def check(content):
        path.write_bytes(content)
        assert not outcome(read_llava, path)  # at most an empty list

    check()


json_scalars = st.sampled_from(
    [None, True, 7, -12.75, 1e-7, 1e300, float("-inf"), "", 'é\ud800\\"]', "\ud83c\udfd4", "a" * 30]
)
json_values = json_scalars | st.lists(json_scalars, max_size=2) | st.dictionaries(st.just("k"), json_scalars)


@fuzzed(600)
@given(
    items=st.lists(json_values, max_size=4), indented=st.booleans(), cut=st.integers(0, 30), chunk=st.integers(1, 40)
)
@example(items=[0, 0.5], indented=False, cut=20, chunk=1)
def test_reading_a_list_in_pieces_equals_json(folder, items, indented, cut, chunk):
    """The list may be cut off before its end."""
    text = json.dumps(items, indent=1 if indented else None)
    path = folder / "list.json"
    path.write_text(text[: len(text) - cut] if cut < 20 else text)
    try:
        expected = json.loads(path.read_text())
    except ValueError:
        expected = None
    streaming.CHUNK_CHARACTERS, own = chunk, streaming.CHUNK_CHARACTERS
    try:
        result = outcome(read_json_list, path)
    finally:
        streaming.CHUNK_CHARACTERS = own
    assert json.dumps(result) == json.dumps(expected if isinstance(expected, list) else None)


@fuzzed(300)
@given(rows=FORMATS["llava"][1])
@example([{"id": i, "conversations": make_turns(["Q", "A"])} for i in ("1", "1", "1~2", 1)])
def test_numbering_changes_only_repeated_ids(folder, rows):
    path = folder / "numbered.json"
    path.write_text(json.dumps(rows))
    numbered = outcome(lambda file: read_llava(file, number_ids=True), path)
    if numbered is not None:
        assert [row | {"id": 0} for row in numbered] == [row | {"id": 0} for row in rows]
        assert len({row["id"] for row in numbered}) == len(rows)
        assert all(row["id"].startswith(str(original["id"])) for row, original in zip(numbered, rows, strict=True))


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """Write six images, and an evaluation file about two of them and two others."""
    folder = tmp_path_factory.mktemp("chain")
    for number in range(8):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    held_out = [{"id": name, "image": name, "captions": ["a square"]} for name in ("0.png", "1.png", "6.png", "7.png")]
    write_jsonl(folder / "evaluation.jsonl", held_out)
    return folder


@fuzzed(120)
@given(
    captions=st.lists(texts, min_size=6, max_size=6),
    texts_of_turns=st.lists(st.lists(texts, min_size=2, max_size=2), max_size=4),
    budget=st.sampled_from([None, 1, 9]),
    brought=st.booleans(),
)
def test_write_jsonl_accepts_output_of_make_dataset(chain, captions, texts_of_turns, budget, brought):
    """Every row is written, dropped with a reason, or left out; later stages read it unchecked."""
    names = [f"{number}.png" for number in range(6)]
    pairs = [{"id": n, "text": build_dj_text(text), "images": [n]} for n, text in zip(names, captions, strict=True)]
    (chain / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    talks = [{"id": 1, "image": "./4.png", "conversations": make_turns(turns)} for turns in texts_of_turns]
    (chain / "talks.json").write_text(json.dumps(talks))
    files = {"pretrain": "pairs.jsonl"} | ({"finetune": "talks.json"} if texts_of_turns else {})
    files |= {"evaluation": "evaluation.jsonl"} if brought else {}
    splits = {split: {"file": str(chain / file), "images": str(chain)} for split, file in files.items()}
    dataset = FilesDataset.model_validate(splits)
    try:
        counts = write_user_dataset(dataset, chain / "out")
    except InputError as error:
        assert str(chain) in str(error)
        return
    assert counts["pretrain"] + counts["left_out"].get("pretrain", 0) == 6
    assert counts["finetune"] + counts["left_out"].get("finetune", 0) == len(texts_of_turns)
    held_out = HeldOutImages(read_jsonl(chain / "out/evaluation.jsonl"), chain)
    rows = {"pretrain": convert_pairs(read_jsonl(chain / "out/pretrain.jsonl"), "")}
    rows["finetune"] = read_json_list(chain / "out/finetune.json")
    for split, split_rows in rows.items():
        rules = build_sample_rules(budget, on_bad_row="drop", max_samples=4)
        try:
            written = write_training_jsonl(split_rows, chain, held_out, chain / "written.jsonl", rules, processes=1)
        except InputError as error:  # all rows are invalid
            assert f"of {counts[split]} rows" in str(error) and "no row of written is left" in str(error)
            continue
        assert written.rows_in == counts[split] and "held_out" not in written.dropped
        assert written.rows_in == written.different_rows + sum(written.dropped.values())
        assert len(list(read_llava(chain / "written.jsonl"))) == written.rows_out
