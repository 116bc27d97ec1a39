"""Published benchmarks, one module each.

A benchmark's module has the benchmark's name and defines:

    FILES             keys of its files under `benchmarks.<name>` with their descriptions, as a literal mapping. Its
                      questions are answered again after a change of one of these files. Only `images` is a folder,
                      whose files are not watched
    VARIANTS          names of its prompts' forms, as a literal tuple; scores of different forms are never compared
    read              (**files) → its questions, each {"variant", "id", "image": path or bytes, "image_id": equal for
                      questions about one image, "prompt", and its ground truth}
    measure           (answers) → metrics in percent by image, including `score`; {} if the ground truth is withheld
    count             (answers) → further counts for metrics.json; optional
    question          (question) → key of the questions that are scored together; optional, by default each question is
                      scored separately
    text              (question) → its text without instructions, and the right answers; optional, without it the
                      training data is not searched for its questions
    write_submission  (answers, path) → submission.xlsx for the benchmark's server; optional

Answers are questions with a `prediction`. docs/examples/benchmark.py is a complete example.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import Metrics, Rows
from dj2mgm.settings.benchmarks import read_declarations


def read_questions(name: str, files: dict[str, str]) -> Iterator[dict]:
    """Yield the benchmark's questions, each with its name as `benchmark`."""
    for row in _import_module(name).read(**files):
        yield {"benchmark": name} | row


def measure_benchmark(name: str, rows: Rows) -> Metrics:
    return _import_module(name).measure(rows)


def count_answers(name: str, rows: Rows) -> dict[str, int]:
    """Count all answers, empty answers, and the benchmark's own counts."""
    counts = {"answers": len(rows), "empty": sum(not row["prediction"].strip() for row in rows)}
    count: Callable[[Rows], dict[str, int]] = getattr(_import_module(name), "count", lambda rows: {})
    return counts | count(rows)


def drop_questions(name: str, rows: Rows, ids: set[str]) -> Rows:
    """Return the answers without the answers to some questions and the answers that are scored together with them."""
    question: Callable[[dict], object] = getattr(_import_module(name), "question", lambda row: row["id"])
    dropped_keys = {question(row) for row in rows if row["id"] in ids}
    return [row for row in rows if question(row) not in dropped_keys]


def read_question_text(name: str, row: dict) -> tuple[str, list[str]] | None:
    """Return a question's text and the right answers; None if the benchmark does not provide them."""
    text: Callable[[dict], tuple[str, list[str]]] | None = getattr(_import_module(name), "text", None)
    return text and text(row)


def save_submission(name: str, rows: Rows, path: Path) -> None:
    """Write the answers as the benchmark's submission."""
    module = _import_module(name)
    if not hasattr(module, "write_submission"):
        raise InputError(f"the benchmark {name} has no submission")
    module.write_submission(rows, path)


def _import_module(name: str) -> ModuleType:
    if name not in (names := read_declarations()):
        raise InputError(f"there is no benchmark {name!r}; known benchmarks are {', '.join(names)}")
    return importlib.import_module(f"{__name__}.{name}")
