"""What is in the training data and evaluated on: how much, whether it was trained on, and the scores without it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dj2mgm.evaluation.leaked_ids import HELD_OUT, read_leaked_ids
from dj2mgm.evaluation.seeds import aggregate, drop_images
from dj2mgm.files import read_json
from dj2mgm.reporting.comparison import GROUP_LABELS, HEADLINES, figure, interval
from dj2mgm.reporting.drawing import grouped
from dj2mgm.reporting.experiment import Experiment

# columns of the table of matches; the last three are of texts, which are compared with benchmarks' only
COUNTS = ("references", "leaked", "questions", "training_images", "training_rows", "texts", "leaked_texts", "text_rows")


@dataclass(frozen=True)
class Match:
    """What is evaluated on, and its images that are in the training data."""

    of: str
    counts: list[str]  # as COUNTS


@dataclass(frozen=True)
class Treatment:
    experiment: str
    index: int
    trained_on: str  # what became of the rows


@dataclass(frozen=True)
class Score:
    experiment: str
    index: int
    group: str
    metric: str
    every: tuple[str, str]  # of all images, with the interval
    rest: tuple[str, str] | None  # without the images that leak; None where no other has the metric


@dataclass(frozen=True)
class LeaksPart:
    """Of one dataset."""

    dataset: str
    link: str  # to the file that lists the matches
    matches: list[Match]
    treatments: list[Treatment]  # none where nothing leaks
    leaked: str  # held-out images
    scores: list[Score]  # none where no held-out image leaks


def leaks_parts(experiments: list[Experiment], page: str | Path) -> Iterator[LeaksPart]:
    """One for each dataset in which leaks were looked for; links are relative to the `page`."""
    by_folder: dict[Path, list[tuple[int, Experiment]]] = {}
    for index, experiment in enumerate(experiments):
        if experiment.leaks:
            by_folder.setdefault(experiment.leaks, []).append((index, experiment))
    for folder, group in by_folder.items():
        file = folder / "leaks.jsonl"
        leaked, summary = read_leaked_ids(file, HELD_OUT), read_json(folder / "summary.json")
        found = any(counts["leaked"] or counts.get("leaked_texts") for counts in summary.values())
        yield LeaksPart(
            group[0][1].dataset.name,
            quote(os.path.relpath(file, Path(page).parent)),
            [
                Match("held-out images" if of == HELD_OUT else of, [_count(counts.get(name)) for name in COUNTS])
                for of, counts in summary.items()
            ],
            [Treatment(one.name, index, _treatment(one)) for index, one in group] if found else [],
            _count(summary.get(HELD_OUT, {}).get("leaked")),
            [score for index, experiment in group for score in _scores(index, experiment, leaked)] if leaked else [],
        )


def _count(number: int | None) -> str:
    return "–" if number is None else grouped(number)


def _treatment(experiment: Experiment) -> str:
    if experiment.config["jsonl"]["leaks"] == "keep":
        return "kept: they were trained on"
    written = experiment.runs[0].jsonl
    lost = {split: written[split]["dropped"] for split in ("pretrain", "finetune")}
    pairs, instructions = (grouped(counts.get("leaked", 0) + counts.get("leaked_text", 0)) for counts in lost.values())
    return f"dropped: {pairs} of the pairs that were left by the filters, {instructions} of the instructions"


def _scores(index: int, experiment: Experiment, leaked: set[str]) -> Iterator[Score]:
    """Headline metrics on the images themselves."""
    rest = aggregate([drop_images(run, leaked) for run in experiment.scores])
    for group, label in GROUP_LABELS.items():
        if group.endswith("/own"):
            for metric in HEADLINES:
                if every := experiment.groups.get(group, {}).get(metric):
                    pair = every, rest.get(group, {}).get(metric)
                    shown = [one and (figure(metric, one["mean"]), interval(metric, one)) for one in pair]
                    yield Score(experiment.name, index, label, HEADLINES[metric][0], *shown)
