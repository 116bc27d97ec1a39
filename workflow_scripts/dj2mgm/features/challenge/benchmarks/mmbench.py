"""MMBench: its table, prompt, (circular) accuracy and submission.

Its file is a tab-separated table with one question with up to four options per row, and the image as base64:

    index  question  hint  A  B  C  D  answer  category  image  source  l2-category  comment  split

`hint`, `C`, `D`, `answer`, `source`, `l2-category`, `comment` and `split` may be missing. The cell of a repeated image
contains the index of the row with the image. A question with rotated options has the question's index plus a million
for each rotation. Under CircularEval (Liu et al. 2023, arXiv:2307.06281) a question is answered right only if all its
rotations are, so a model that always answers A scores 0.
"""

import base64
import binascii
import csv
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from openpyxl import Workbook
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

from dj2mgm.data.formats import check_no_control
from dj2mgm.data.images import BadImageError, load_image
from dj2mgm.errors import InputError, quote_value
from dj2mgm.evaluation.groups import Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.features.challenge.benchmarks import Benchmark
from dj2mgm.storage.files import replace_file
from dj2mgm.storage.streaming import UniqueIds, open_input

REQUIRED_COLUMNS = ("index", "question", "A", "B", "category", "image")
LETTERS = "ABCD"
INSTRUCTION = "Answer with the option's letter from the given choices directly."  # LLaVA's single-prediction prompt
LETTER = re.compile(r"\(?([A-D])(?:[).:,]+(?=\s|$)|$)", re.MULTILINE)  # at the start of an answer
ROTATION_STEP = 1_000_000
MAX_LINE = 2**28  # characters; an image is one cell
MAX_REFERENCE_LENGTH = 64  # characters; a longer cell is an image, as in OpenCompass's own reader
COLUMNS = ("index", "question", *LETTERS, "prediction", "answer", "split")  # columns of a submission


def read(questions: str | Path) -> Iterator[dict]:
    """Yield questions with their ground truth, every image decoded once.

    {"variant", "id", "index": its number, "image": bytes of the file, "image_id": id of the first row with the image,
    "prompt", "question", "options": {letter: text}, "answer": letter or None, "category", "l2_category", "split"}
    """
    path, rows = Path(questions), []
    ids = UniqueIds(path)
    for number, cells in _read_cells(path):
        row = _parse_row(cells, f"{path}, row {number}")
        ids.add(row["id"], number)
        rows.append(row)
    if not rows:
        raise InputError(f"{path} contains no questions; download the file again")
    variant = "circular" if any(row["index"] >= ROTATION_STEP for row in rows) else "single"
    images = {row["id"]: row["image"] for row in rows}
    first_ids: dict[bytes, str] = {}
    for number, row in enumerate(rows, start=1):
        location = f"{path}, row {number}"
        if (row["answer"] is None) != (rows[0]["answer"] is None):
            raise InputError(f"{location}: 'answer' must be given in all rows or in none")
        if isinstance(row["image"], str):
            row["image"] = images.get(row["image"])
            if not isinstance(row["image"], bytes):
                raise InputError(
                    f"{location}: 'image' names a row without an image of its own; download the file again"
                )
        yield {"variant": variant, "image_id": first_ids.setdefault(row["image"], row["id"])} | row


def get_question_number(row: dict) -> int:
    """Return the number that a question shares with its rotations."""
    return row["index"] % ROTATION_STEP


def get_text(row: dict) -> tuple[str, list[str]]:
    answer = row["answer"]
    return row["question"], [] if answer is None else [answer, row["options"][answer]]


def _read_cells(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield numbered rows by column; a missing cell is empty."""
    csv.field_size_limit(MAX_LINE)
    number = 0
    try:
        with open_input(path, newline="") as file:
            lines = iter(partial(file.readline, MAX_LINE), "")  # a longer line is read in parts, which lack cells
            table = csv.DictReader(lines, dialect="excel-tab", strict=True)
            if missing := [name for name in REQUIRED_COLUMNS if name not in (table.fieldnames or ())]:
                raise InputError(
                    f"{path}: the column {missing[0]!r} is missing; expected MMBench's tab-separated table"
                )
            for number, cells in enumerate(table, start=1):
                if None in cells or None in cells.values():
                    raise InputError(
                        f"{path}, row {number}: the number of cells differs from the header's; download the file again"
                    )
                yield number, {name: "" if cell.strip().lower() == "nan" else cell for name, cell in cells.items()}
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}, row {number + 1}: not a tab-separated table in UTF-8 ({error})") from None


def _parse_row(cells: dict[str, str], location: str) -> dict:
    """Check the cells of a question, and return its row with prompt and image (bytes, or another row's id)."""
    if not cells["index"].isdecimal():
        raise InputError(f"{location}: 'index' must be a whole number, found {quote_value(cells['index'])}")
    if not cells["question"].strip():
        raise InputError(f"{location}: 'question' is empty")
    options = {letter: cells[letter] for letter in LETTERS if cells.get(letter)}
    if list(options) != list(LETTERS[: len(options)]) or len(options) < 2:
        raise InputError(
            f"{location}: expected two to four options without a gap, found {', '.join(options) or 'none'}"
        )
    answer = cells.get("answer") or None
    if answer is not None and answer not in options:
        raise InputError(
            f"{location}: 'answer' must be one of the options {', '.join(options)}, found {quote_value(answer)}"
        )
    prompt = "\n".join(
        [
            *filter(None, [cells.get("hint")]),
            cells["question"],
            *(f"{letter}. {text}" for letter, text in options.items()),
            INSTRUCTION,
        ]
    )
    check_no_control(prompt, location)
    return {
        "id": str(int(cells["index"])),
        "index": int(cells["index"]),
        "image": _parse_image(cells["image"], location),
        "prompt": prompt,
        "question": cells["question"],
        "options": options,
        "answer": answer,
        "category": cells["category"],
        "l2_category": cells.get("l2-category", ""),
        "split": cells.get("split", ""),
    }


def _parse_image(cell: str, location: str) -> bytes | str:
    """Return the image file's bytes, or the id of the row with the image."""
    if len(cell) <= MAX_REFERENCE_LENGTH and cell.isdecimal():
        return str(int(cell))
    try:
        image = base64.b64decode(cell, validate=True)
        load_image(image)
    except (binascii.Error, BadImageError) as error:
        raise InputError(
            f"{location}: 'image' is not a complete image in base64 ({error}); download the file again"
        ) from None
    return image


def parse_chosen_option(prediction: str, options: dict[str, str]) -> str | None:
    """Return the letter that an answer names ("B", "B.", "(B)", "B. a cat") or whose text it repeats; else None."""
    text = prediction.strip()
    match = LETTER.match(text)
    if match and match[1] in options:
        return match[1]
    letters = [letter for letter, option in options.items() if option.strip().lower() == text.lower()]
    return letters[0] if len(letters) == 1 else None


def measure(rows: Rows) -> Metrics:
    """Compute the accuracy in percent, grouped by image; {} if the right answers are withheld.

    `score` is over all questions, `category/<name>` and `l2_category/<name>` over the questions of a category.
    """
    if rows[0]["answer"] is None:
        return {}
    rotations: dict[int, Rows] = {}
    for row in rows:
        rotations.setdefault(get_question_number(row), []).append(row)
    by_metric: dict[str, list[int]] = {"score": list(rotations)}
    for key in ("l2_category", "category"):
        for number in sorted(rotations, key=lambda number: rotations[number][0][key]):
            if category := rotations[number][0][key]:
                by_metric.setdefault(f"{key}/{category}", []).append(number)
    right = {
        number: all(parse_chosen_option(row["prediction"], row["options"]) == row["answer"] for row in group)
        for number, group in rotations.items()
    }
    image = {number: group[0]["image_id"] for number, group in rotations.items()}
    return {
        name: Measurements.from_values(
            [100 * right[number] for number in numbers], [image[number] for number in numbers]
        )
        for name, numbers in by_metric.items()
    }


def count(rows: Rows) -> dict[str, int]:
    """Count as `unreadable` the answers that name no option."""
    return {"unreadable": sum(parse_chosen_option(row["prediction"], row["options"]) is None for row in rows)}


def write_submission(rows: Rows, path: Path) -> None:
    """Write a row for each question: index, question, A to D, the unchanged prediction, answer, split."""
    with replace_file(path, "wb") as file:
        build_workbook(rows).save(file)


def build_workbook(rows: Rows) -> Workbook:
    workbook = Workbook()
    workbook.active.append(COLUMNS)
    for row in rows:
        values = row | {letter: row["options"].get(letter) for letter in LETTERS}
        workbook.active.append([_make_printable(values[column]) for column in COLUMNS])
    for cells in workbook.active.iter_rows(min_row=2):
        for cell in cells:
            if isinstance(cell.value, str):
                cell.data_type = "s"  # "= 4" is an answer, not a formula
    return workbook


def _make_printable(value: object) -> object:
    """Remove the control characters of an answer that a spreadsheet cannot contain."""
    return ILLEGAL_CHARACTERS_RE.sub("", value) if isinstance(value, str) else value


BENCHMARK = Benchmark(
    files={"questions": "a tab-separated table with images, such as mmbench_dev_20230712.tsv"},
    variants=("circular", "single"),  # options rotated or not
    read=read,
    measure=measure,
    count=count,
    get_key=get_question_number,
    get_text=get_text,
    write_submission=write_submission,
)
