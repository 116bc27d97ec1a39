"""Reading of TextVQA files: matched answers, variants, and messages about invalid rows."""

import json
from pathlib import Path

import pytest

from benchmark_files import make_textvqa_question, make_textvqa_truth, write_rows, write_textvqa
from dj2mgm.errors import InputError
from dj2mgm.features.challenge.benchmarks.textvqa import read as read_textvqa
from dj2mgm.storage.files import read_json, read_jsonl


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    return write_textvqa(tmp_path)


def change_questions(files: dict[str, str], change) -> None:
    rows = list(read_jsonl(files["questions"]))
    change(rows)
    write_rows(Path(files["questions"]), rows)


def change_answers(files: dict[str, str], change) -> None:
    content = read_json(files["answers"])
    change(content["data"])
    Path(files["answers"]).write_text(json.dumps(content), encoding="utf-8")


def test_questions_match_answers_in_any_case_and_order(files):
    change_answers(files, list.reverse)
    rows = list(read_textvqa(**files))
    assert [(row["id"], row["image_id"], row["answers"][0]) for row in rows] == [
        ("34600", "im1", "red"),
        ("34601", "im1", "two"),
        ("34602", "im2", "blue"),
    ]
    assert rows[0]["prompt"] == (
        "What color is the circle?\nReference OCR token: red, TWO\nAnswer the question using a single word or phrase."
    )
    assert rows[2]["image"] == Path(files["images"]).resolve() / "im2.png"


@pytest.mark.parametrize(
    ("ocr", "variant"), [("a, b", "ocr_tokens"), ("", "ocr_tokens"), (None, "no_ocr_tokens")], ids=repr
)
def test_the_variant_depends_on_ocr_tokens_in_prompts(tmp_path, ocr, variant):
    assert {row["variant"] for row in read_textvqa(**write_textvqa(tmp_path, ocr))} == {variant}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.append(rows[1]), "row 4 repeats the question of row 2"),
        (lambda rows: rows.pop(), "1 of the 3 questions in .* are missing"),
        (lambda rows: rows[1].update(make_textvqa_question("im1", "who?")), "row 2: .* has no answers to 'who\\?'"),
        (
            lambda rows: rows[1].update(make_textvqa_question("im1", "how many objects are there?", None)),
            "row 2 has",
        ),
        (lambda rows: rows[2].update(image="../im2.png"), "row 3: image outside"),
        (lambda rows: rows[2].update(image="im3.png"), "row 3: image missing"),
        (lambda rows: rows[2].pop("text"), "row 3: 'text' must be a string"),
        (lambda rows: rows[0].update(question_id=7), "row 1: 'question_id' must be a string, found 7"),
        (lambda rows: rows[0].update(text="What?"), "row 1: 'text' must be the question"),
        (lambda rows: rows[0].update(text=rows[0]["text"] + "<image>"), "row 1: .* control token <image>"),
    ],
)
def test_an_invalid_question_is_named(files, change, message):
    change_questions(files, change)
    with pytest.raises(InputError, match=message) as error:
        list(read_textvqa(**files))
    assert "questions.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1]["answers"].pop(), "row 2: 'answers' must contain 10 strings"),
        (lambda rows: rows[1].pop("answers"), "row 2: 'answers' must contain 10 strings; the test split has none"),
        (lambda rows: rows[1]["answers"].__setitem__(3, None), "row 2: 'answers' must contain 10 strings"),
        (
            lambda rows: rows.append(make_textvqa_truth(9, "im2", "What color?", ["x"] * 10)),
            "row 4 repeats the question",
        ),
        (lambda rows: rows[0].pop("image_id"), "row 1: 'image_id' and 'question' must be strings"),
        (lambda rows: rows[0].pop("question_id"), "row 1: 'question_id' must be a number"),
        (list.clear, "expected TextVQA's"),
    ],
)
def test_invalid_answers_are_named(files, change, message):
    change_answers(files, change)
    with pytest.raises(InputError, match=message) as error:
        list(read_textvqa(**files))
    assert "answers.json" in str(error.value)


def test_a_truncated_image_is_named_before_any_answer(files):
    path = Path(files["images"]) / "im2.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match="questions.jsonl, row 3: image undecodable"):
        list(read_textvqa(**files))
