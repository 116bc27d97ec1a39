"""Published benchmarks, one a file, which is named as the benchmark and holds:

    FILES             the keys of its files under `benchmarks.<name>`, as a literal tuple. Its questions are answered
                      again after a change of one of these files. Only `images` is a folder, whose files are not watched
    VARIANTS          names for its prompts' forms, as a literal tuple: scores of two forms are never compared
    read              (**files) → its questions, each {"variant", "id", "image": path or bytes, "image_id": the same for
                      questions about one image, "prompt", and its truth}
    measure           (answers) → metrics in per cent by image, among them `score`; {} where the truth is withheld
    count             (answers) → more counts for metrics.json; may be missing
    question          (a question) → what it shares with those that are scored with it as one; may be missing: none are
    text              (a question) → what it asks, without instructions, and the right answers; may be missing: then it
                      is not looked for in the training data
    write_submission  (answers, path) → submission.xlsx for the benchmark's server; may be missing

Answers are questions with a `prediction`. docs/examples/benchmark.py is a whole one.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from dj2mgm.config.benchmarks import declarations
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import Metrics, Rows


def read_questions(name: str, files: dict[str, str]) -> Iterator[dict]:
    """The benchmark's questions; each has its name as `benchmark`."""
    for row in _module(name).read(**files):
        yield {"benchmark": name} | row


def measure_answers(name: str, rows: Rows) -> Metrics:
    return _module(name).measure(rows)


def count_answers(name: str, rows: Rows) -> dict[str, int]:
    """Answers, those that are empty, and what the benchmark counts itself."""
    counts = {"answers": len(rows), "empty": sum(not row["prediction"].strip() for row in rows)}
    count: Callable[[Rows], dict[str, int]] = getattr(_module(name), "count", lambda rows: {})
    return counts | count(rows)


def leave_out(name: str, rows: Rows, ids: set[str]) -> Rows:
    """The answers without those to the questions of these ids, and without those that are scored with one of them."""
    question: Callable[[dict], object] = getattr(_module(name), "question", lambda row: row["id"])
    left_out = {question(row) for row in rows if row["id"] in ids}
    return [row for row in rows if question(row) not in left_out]


def text_of(name: str, row: dict) -> tuple[str, list[str]] | None:
    """What a question asks and the answers that are right; None where the benchmark does not tell."""
    text: Callable[[dict], tuple[str, list[str]]] | None = getattr(_module(name), "text", None)
    return text and text(row)


def write_submission(name: str, rows: Rows, path: Path) -> None:
    """
    Raises:
        InputError: the benchmark has no submission.
    """
    module = _module(name)
    if not hasattr(module, "write_submission"):
        raise InputError(f"the benchmark {name} takes no submission")
    module.write_submission(rows, path)


def _module(name: str) -> ModuleType:
    if name not in (known := declarations()):
        raise InputError(f"there is no benchmark {name!r}; known are {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{name}")
