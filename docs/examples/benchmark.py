"""A benchmark of questions that are answered with yes or no.

Copied to workflow_scripts/dj2mgm/features/challenge/benchmarks/yes_no.py it is the benchmark `yes_no`, and this in
config/config.yaml names its files:

    benchmarks:
      yes_no: {questions: /data/yes_no/questions.jsonl, images: /data/yes_no/images}

`questions` has one question per line:

    {"id": "1", "image": "a.jpg", "question": "Is there a cat in the image?", "answer": "no"}
"""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.data.formats import check_no_control
from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.features.challenge.benchmarks import Benchmark
from dj2mgm.storage.streaming import UniqueIds, read_objects

INSTRUCTION = "Answer the question using a single word, yes or no."
ANSWERS = ("yes", "no")


def read(questions: str, images: str) -> Iterator[dict]:
    """Yield questions with their truth: {"variant", "id", "image": path, "image_id", "prompt", "answer"}.

    Raises:
        InputError: names the file, the row (from 1) and the remedy.
    """
    ids = UniqueIds(questions)
    for number, row in read_objects(questions):
        location = f"{questions}, row {number}"
        for key in ("id", "image", "question"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError(f"{location}: {key!r} must be a string, found {row.get(key)!r}")
        if row.get("answer") not in ANSWERS:
            raise InputError(f"{location}: 'answer' must be yes or no, found {row.get('answer')!r}")
        ids.add(row["id"], number)
        prompt = f"{row['question']}\n{INSTRUCTION}"
        check_no_control(prompt, location)
        yield {
            "variant": "one_word",
            "id": row["id"],
            "image": _verify_image(images, row["image"], location),
            "image_id": row["image"],
            "prompt": prompt,
            "answer": row["answer"],
        }


def get_text(row: dict) -> tuple[str, list[str]]:
    return row["prompt"].split("\n")[0], [row["answer"]]


def measure(rows: Rows) -> Metrics:
    """`score`: accuracy in percent, with the questions about one image as one group."""
    scores = [100.0 * (_normalize(row["prediction"]) == row["answer"]) for row in rows]
    return {"score": Measurements.from_values(scores, [row["image_id"] for row in rows])}


def count(rows: Rows) -> dict[str, int]:
    """`unreadable`: answers that are neither yes nor no."""
    return {"unreadable": sum(_normalize(row["prediction"]) not in ANSWERS for row in rows)}


def _normalize(prediction: str) -> str:
    return prediction.strip().rstrip(".!").lower()


def _verify_image(folder: str, relative: str, location: str) -> Path:
    try:
        path = locate_image(folder, relative)
        load_image(path)
    except BadImageError as error:
        raise InputError(f"{location}: image {error}; check the key 'images'") from None
    return path


BENCHMARK = Benchmark(
    files={"questions": "jsonl of questions and answers", "images": "folder of their images"},
    variants=("one_word",),
    read=read,
    measure=measure,
    count=count,
    get_text=get_text,
)
