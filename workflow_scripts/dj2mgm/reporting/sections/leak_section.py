"""Held-out and benchmark data that leak into the training data: counts, treatment, and scores without them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dj2mgm.evaluation.leaked_ids import HELD_OUT, read_leaked_ids
from dj2mgm.evaluation.run_scores import aggregate, drop_images
from dj2mgm.reporting.comparison import GROUP_LABELS, HEADLINES, find_title, format_interval, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults, group_experiments
from dj2mgm.reporting.rendering import Cell, Table, TableRow, format_integer
from dj2mgm.score_groups import OWN, split_group
from dj2mgm.storage.files import read_json

COUNTS = {  # columns of the table; the last three count texts, which are compared for benchmarks only
    "references": "images",
    "leaked": "leaked images",
    "questions": "questions about leaked images",
    "training_images": "matching images in the dataset",
    "training_rows": "rows with these images",
    "texts": "questions compared by text",
    "leaked_texts": "leaked questions",
    "text_rows": "instructions with leaked questions",
}


@dataclass(frozen=True)
class LeakSection:
    """Leaks of one dataset."""

    dataset: str
    link: str  # to the file that lists the matches
    matches: Table  # leaks of the held-out images and of each benchmark
    treatments: dict[str, str]  # of leaking rows, by experiment; empty if nothing leaks
    leaked: str  # number of held-out images that leak
    scores: Table  # with and without the images that leak; no rows if no held-out image leaks


def build_leak_sections(experiments: list[ExperimentResults], page: str | Path) -> Iterator[LeakSection]:
    """Return a section for each dataset with a leak search; links are relative to `page`."""
    for folder, group in group_experiments(experiments, lambda experiment: experiment.leaks).items():
        if folder is None:
            continue
        file = folder / "leaks.jsonl"
        leaked_ids, summary = read_leaked_ids(file, HELD_OUT), read_json(folder / "summary.json")
        has_leaks = any(counts["leaked"] or counts.get("leaked_texts") for counts in summary.values())
        name = group[0].dataset.name
        matches = [
            TableRow(
                "held-out images" if origin == HELD_OUT else origin,
                [Cell(_format_count(counts.get(key))) for key in COUNTS],
            )
            for origin, counts in summary.items()
        ]
        scores = [row for experiment in group if leaked_ids for row in _compare_scores(experiment, leaked_ids)]
        titles = ["experiment", "model", "metric", "all images", "without leaked images"]
        yield LeakSection(
            name,
            quote(os.path.relpath(file, Path(page).parent)),
            Table(f"Leaks of {name}", ["evaluation data", *COUNTS.values()], matches),
            {experiment.name: _describe_treatment(experiment) for experiment in group} if has_leaks else {},
            _format_count(summary.get(HELD_OUT, {}).get("leaked")),
            Table(f"Scores with and without leaks of {name}", titles, scores, colored=True),
        )


def _format_count(number: int | None) -> str:
    return "–" if number is None else format_integer(number)


def _describe_treatment(experiment: ExperimentResults) -> str:
    if experiment.config.jsonl.leaks == "keep":
        return "was trained on these rows"
    files = experiment.runs[0].jsonl.files
    pairs, instructions = (
        format_integer(dropped.get("leaked", 0) + dropped.get("leaked_text", 0))
        for dropped in (files[split].dropped for split in ("pretrain", "finetune"))
    )
    return f"dropped {pairs} pairs (after the filters) and {instructions} instructions"


def _compare_scores(experiment: ExperimentResults, leaked_ids: set[str]) -> Iterator[TableRow]:
    """Return the headline metrics with and without the leaked images; controls are left out."""
    rest = aggregate([drop_images(run, leaked_ids) for run in experiment.scores])
    for group, label in GROUP_LABELS.items():
        if split_group(group)[1] == OWN:
            for metric in HEADLINES:
                if every := experiment.groups.get(group, {}).get(metric):
                    pair = every, rest.get(group, {}).get(metric)
                    cells = [
                        estimate and Cell(format_score(metric, estimate.mean), format_interval(metric, estimate))
                        for estimate in pair
                    ]
                    yield TableRow(experiment.name, [Cell(label), Cell(find_title(metric)), *cells])
