"""Small benchmark files in their real formats, and answers to them."""

import base64
import csv
import io
import json
from pathlib import Path

from PIL import Image

from tiny_models import save_image

MMBENCH_COLUMNS = "index question hint A B C D answer category image source l2-category comment split".split()
INSTRUCTION = "Answer the question using a single word or phrase."


def make_textvqa_question(image: str, question: str, ocr: str | None = "red, TWO") -> dict:
    """Return a row of LLaVA's file, with a capitalized question and the image's id as question id."""
    lines = [question.capitalize(), *([] if ocr is None else [f"Reference OCR token: {ocr}"]), INSTRUCTION]
    return {"question_id": image, "image": f"{image}.png", "text": "\n".join(lines), "category": "default"}


def make_textvqa_truth(number: int, image: str, question: str, answers: list[str]) -> dict:
    return {"question_id": number, "image_id": image, "question": question, "answers": answers, "set_name": "val"}


def write_textvqa(folder: Path, ocr: str | None = "red, TWO") -> dict[str, str]:
    """Write three questions about two images, and return the configuration's `files`."""
    questions = [("im1", "what color is the circle?"), ("im1", "how many objects are there?"), ("im2", "what color?")]
    answers = [["red"] * 10, ["two"] * 2 + ["2"] + ["three"] * 7, ["blue"] + ["teal"] * 9]
    for image, color in (("im1", (200, 30, 30)), ("im2", (30, 40, 200))):
        save_image(folder / f"{image}.png", color)
    write_rows(folder / "questions.jsonl", [make_textvqa_question(*pair, ocr=ocr) for pair in questions])
    truth = [make_textvqa_truth(34600 + i, *pair, answers[i]) for i, pair in enumerate(questions)]
    (folder / "answers.json").write_text(json.dumps({"dataset_type": "val", "data": truth}), encoding="utf-8")
    return {"questions": f"{folder}/questions.jsonl", "answers": f"{folder}/answers.json", "images": str(folder)}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def png_in_base64(color: tuple[int, int, int] = (200, 30, 30)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_mmbench_row(index: int, answer: str = "B", **changes: str) -> dict[str, str]:
    row = dict.fromkeys(MMBENCH_COLUMNS, "") | {
        "index": str(index),
        "question": "What color is the circle?",
        "A": "blue",
        "B": "red",
        "answer": answer,
        "category": "attribute_recognition",
        "image": png_in_base64(),
        "l2-category": "finegrained_perception (instance-level)",
        "split": "dev",
    }
    return row | changes


def write_mmbench(path: Path, rows: list[dict[str, str]]) -> dict[str, str]:
    """Write a table, and return the configuration's `files`."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, MMBENCH_COLUMNS, dialect="excel-tab", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return {"questions": str(path)}


def make_circular_rows() -> list[dict[str, str]]:
    """Return two questions and their rotations, which refer to the first one's image."""
    rotated = {"A": "red", "B": "blue", "answer": "A"}
    return [
        make_mmbench_row(241, hint="Look at the\nmiddle."),
        make_mmbench_row(252, question='Which is "red"?', category="image_style", image=png_in_base64((9, 9, 200))),
        make_mmbench_row(1_000_241, **rotated, image="241", hint="Look at the\nmiddle."),
        make_mmbench_row(1_000_252, **rotated, question='Which is "red"?', category="image_style", image="252"),
    ]
