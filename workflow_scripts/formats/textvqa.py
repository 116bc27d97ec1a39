"""TextVQA's validation questions as LLaVA asks them, and the ten answers that people gave to each.

LLaVA's llava_textvqa_val_v051_ocr.jsonl, a question a line; `question_id` is the image's, the OCR line may be missing:

    {"question_id": "003a8ae2ef43b901", "image": "003a8ae2ef43b901.jpg", "text": "What is the brand of this camera?
     \\nReference OCR token: DAKOTA, DIGITAL\\nAnswer the question using a single word or phrase."}

TextVQA's own TextVQA_0.5.1_val.json:

    {"data": [{"question_id": 34602, "image_id": "003a8ae2ef43b901", "question": "what is the brand of this camera?",
               "answers": ["nous les gosses", "dakota", …]}, …]}
"""

from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from formats.images import BadImage, load_image, locate_image
from formats.prompts import check_no_control
from formats.rows import check_object, read_json_file, read_objects

OCR_LINE = "Reference OCR token"
ANSWERS = 10

Key = tuple[str, str]  # image id and question in lower case: what the two files have in common


def read_textvqa(questions: str | Path, answers: str | Path, images: str | Path) -> Iterator[dict]:
    """Yield questions with their truth, every image opened once.

    {"benchmark": "textvqa", "variant": "ocr_tokens" or "no_ocr_tokens", "id": TextVQA's question id, "image_id",
    "image": path, "prompt", "answers": ten texts}

    Raises:
        InputError: names the file, the row (from 1) and the remedy; the two files must hold the same questions.
    """
    truth = _read_answers(Path(answers))
    variant, seen, paths = None, {}, {}
    for number, row in read_objects(questions):
        where = f"{questions}, row {number}"
        for name in ("question_id", "image", "text"):
            if not isinstance(row.get(name), str):
                raise InputError(f"{where}: {name!r} must be a text, found {row.get(name)!r}")
        question, own_variant = _parse_prompt(row["text"], where)
        variant = variant or own_variant
        if own_variant != variant:
            raise InputError(f"{where} is of the variant {own_variant}, row 1 of {variant}; ask all with OCR or none")
        key = row["question_id"], question
        if (first := seen.setdefault(key, number)) != number:
            raise InputError(f"{where} asks the same as row {first}; delete one of them")
        if key not in truth:
            raise InputError(f"{where}: {answers} has no answers to {question!r} about the image {key[0]}")
        if row["image"] not in paths:
            paths[row["image"]] = _verified_image(images, row["image"], where)
        yield {
            "benchmark": "textvqa",
            "variant": variant,
            "id": str(truth[key]["question_id"]),
            "image_id": row["question_id"],
            "image": paths[row["image"]],
            "prompt": row["text"],
            "answers": truth[key]["answers"],
        }
    if unasked := len(truth) - len(seen):
        raise InputError(
            f"{questions}: {unasked} of the {len(truth)} questions in {answers} are not asked; ask them all"
        )


def _parse_prompt(text: str, where: str) -> tuple[str, str]:
    """The question alone, in lower case, and the prompt's variant."""
    check_no_control(text, where)
    lines = text.split("\n")
    has_ocr = len(lines) == 3 and lines[1].startswith(OCR_LINE)
    if not has_ocr and len(lines) != 2:
        raise InputError(
            f"{where}: 'text' must be the question, perhaps a line {OCR_LINE!r}, and the instruction, each on one line"
        )
    return lines[0].strip().lower(), "ocr_tokens" if has_ocr else "no_ocr_tokens"


def _verified_image(root: str | Path, relative: str, where: str) -> Path:
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImage as error:
        raise InputError(f"{where}: image {error}; check benchmarks.textvqa.images") from None
    return path


def _read_answers(path: Path) -> dict[Key, dict]:
    content = read_json_file(path)
    if not isinstance(content, dict) or not isinstance(content.get("data"), list) or not content["data"]:
        raise InputError(f"{path}: expected TextVQA's {{'data': [questions with answers]}}")
    truth: dict[Key, dict] = {}
    for number, row in enumerate(content["data"], start=1):
        where = f"{path}, row {number}"
        check_object(row, where)
        if not isinstance(row.get("image_id"), str) or not isinstance(row.get("question"), str):
            raise InputError(f"{where}: 'image_id' and 'question' must be texts")
        if not isinstance(row.get("question_id"), int | str) or isinstance(row["question_id"], bool):
            raise InputError(f"{where}: 'question_id' must be a number, found {row.get('question_id')!r}")
        given = row.get("answers")
        if not isinstance(given, list) or len(given) != ANSWERS or not all(isinstance(text, str) for text in given):
            raise InputError(f"{where}: 'answers' must hold {ANSWERS} texts; the test split has none, take validation")
        key = row["image_id"], row["question"].strip().lower()
        if key in truth:
            raise InputError(f"{where}: {row['question']!r} about the image {key[0]} was asked before; delete one row")
        truth[key] = row
    return truth
