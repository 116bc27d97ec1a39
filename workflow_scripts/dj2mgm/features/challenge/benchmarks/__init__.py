"""Published benchmarks, one module each.

A benchmark's module has the benchmark's name and declares `BENCHMARK = Benchmark(…)`. docs/examples/benchmark.py is a
complete example.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import Metrics, Rows
from dj2mgm.features.challenge.challenge_keys import read_declarations


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A published benchmark. Answers are questions with a `prediction`.

    Attributes:
        files: keys of its files under `benchmarks.<name>` with their descriptions, as a literal. Its questions are
            answered again after a change of one of these files. Only `images` is a folder, whose files are not watched.
        variants: names of its prompts' forms, as a literal. Scores of different forms are never compared.
        read: (**files) → its questions, each {"variant", "id", "image": path or bytes, "image_id": equal for questions
            about one image, "prompt", and its ground truth}.
        measure: (answers) → metrics in percent by image, including `score`; {} if the ground truth is withheld.
        count: (answers) → further counts for metrics.json.
        get_key: (question) → key of the questions that are scored together.
        get_text: (question) → its text without instructions, and the right answers. Without this function, the training
            data is not searched for its questions.
        write_submission: (answers, path) → None; writes submission.xlsx for the benchmark's server.
    """

    files: dict[str, str]
    variants: tuple[str, ...]
    read: Callable[..., Iterator[dict]]
    measure: Callable[[Rows], Metrics]
    count: Callable[[Rows], dict[str, int]] = lambda rows: {}
    get_key: Callable[[dict], object] = itemgetter("id")
    get_text: Callable[[dict], tuple[str, list[str]]] | None = None
    write_submission: Callable[[Rows, Path], None] | None = None

    def count_answers(self, rows: Rows) -> dict[str, int]:
        """Count all answers, empty answers, and the benchmark's own counts."""
        counts = {"answers": len(rows), "empty": sum(not row["prediction"].strip() for row in rows)}
        return counts | self.count(rows)

    def drop_questions(self, rows: Rows, ids: set[str]) -> Rows:
        """Return the answers without those to questions of these ids, or to questions that are scored with them."""
        dropped_keys = {self.get_key(row) for row in rows if row["id"] in ids}
        return [row for row in rows if self.get_key(row) not in dropped_keys]


def load_benchmark(name: str) -> Benchmark:
    if name not in (names := read_declarations()):
        raise InputError(f"there is no benchmark {name!r}; known benchmarks are {', '.join(names)}")
    return importlib.import_module(f"{__name__}.{name}").BENCHMARK


def read_questions(name: str, files: dict[str, str]) -> Iterator[dict]:
    """Yield the benchmark's questions, each with its name as `benchmark`."""
    for row in load_benchmark(name).read(**files):
        yield {"benchmark": name} | row
