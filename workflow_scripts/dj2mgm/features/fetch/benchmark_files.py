"""Conversion of the hub's benchmarks from parquet to the files that `benchmarks` names in the configuration."""

import base64
import csv
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dj2mgm.data.images import BadImageError, detect_suffix
from dj2mgm.errors import InputError
from dj2mgm.settings.string_formats import has_format
from dj2mgm.storage.files import replace_file, write_bytes, write_json, write_jsonl

ROWS_AT_ONCE = 64  # rows that are read together
INSTRUCTION = "Answer the question using a single word or phrase."  # LLaVA's
MMBENCH_COLUMNS = {  # columns of the table, by column of the parquet files
    "index": "index",
    "question": "question",
    "hint": "hint",
    "A": "A",
    "B": "B",
    "C": "C",
    "D": "D",
    "answer": "answer",
    "category": "category",
    "image": "image",
    "source": "source",
    "L2-category": "l2-category",
    "comment": "comment",
    "split": "split",
}


@dataclass(frozen=True)
class BenchmarkWriter:
    """Files of a benchmark.

    Attributes:
        write: function that converts parquet files into a folder.
        files: the files' names in this folder by key of `benchmarks.<name>`.
    """

    write: Callable[[list[Path], Path], None]
    files: dict[str, str]


def write_textvqa(files: list[Path], folder: Path) -> None:
    """Write LLaVA's questions with OCR tokens, TextVQA's answers, and each image once."""
    images: dict[str, str] = {}
    questions, answers = [], []
    for row in _read_rows(files):
        name = str(row["image_id"])
        if not has_format("name", name):
            raise InputError(f"{files[0].parent}: {name!r} is not the id of an image; download the benchmark again")
        if name not in images:
            content = _read_image(row, files)
            images[name] = name + _find_suffix(content, name, files)
            write_bytes(folder / "images" / images[name], content)
        tokens = " ".join(", ".join(row["ocr_tokens"]).split())
        text = f"{row['question'].capitalize()}\nReference OCR token: {tokens}\n{INSTRUCTION}"
        questions.append({"question_id": name, "image": images[name], "text": text})
        answers.append({"image_id": name} | {key: row[key] for key in ("question_id", "question", "answers")})
    write_jsonl(folder / "questions.jsonl", questions)
    write_json(folder / "answers.json", {"data": answers})


def write_mmbench(files: list[Path], folder: Path) -> None:
    """Write MMBench's own table; the cell of a repeated image names the first row with it."""
    first: dict[bytes, str] = {}
    with replace_file(folder / "questions.tsv") as file:
        table = csv.DictWriter(file, MMBENCH_COLUMNS.values(), dialect="excel-tab", lineterminator="\n", restval="")
        table.writeheader()
        for row in _read_rows(files):
            content, number = _read_image(row, files), str(int(row["index"]))
            before = first.setdefault(hashlib.sha256(content).digest(), number)
            image = base64.b64encode(content).decode() if before == number else before
            cells = {ours: row.get(theirs) for theirs, ours in MMBENCH_COLUMNS.items()}
            cells |= {"index": number, "image": image}
            table.writerow({name: "" if cell is None else str(cell) for name, cell in cells.items()})


WRITERS = {
    "textvqa": BenchmarkWriter(
        write_textvqa, {"questions": "questions.jsonl", "answers": "answers.json", "images": "images"}
    ),
    "mmbench": BenchmarkWriter(write_mmbench, {"questions": "questions.tsv"}),
}


def _read_rows(files: list[Path]) -> Iterator[dict]:
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{file} is damaged or not a parquet file ({error}); download it again") from None


def _find_suffix(content: bytes, name: str, files: list[Path]) -> str:
    try:
        return detect_suffix(content)
    except BadImageError as error:
        raise InputError(f"{files[0].parent}: image {name} cannot be opened ({error}); download it again") from None


def _read_image(row: dict, files: list[Path]) -> bytes:
    content = row["image"].get("bytes") if isinstance(row.get("image"), dict) else None
    if not isinstance(content, bytes):
        raise InputError(f"{files[0].parent}: a row has no image; download the benchmark again")
    return content
