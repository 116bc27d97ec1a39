"""The differences of all metrics to the reference, and where intervals are too narrow, as tables."""

from dataclasses import dataclass

from evaluation.intervals import Estimate
from evaluation.seeds import Estimates
from reporting.comparison import GROUP_LABELS, HEADLINES, gain, interval, verdict
from reporting.panels import VERDICTS


@dataclass(frozen=True)
class Cell:
    text: str
    interval: str
    verdict: str  # better, worse or same; empty for controls, which nothing should improve


@dataclass(frozen=True)
class Coverage:
    """In how many of 100 simulated studies the 95 % interval holds the share of right answers.

    The true share is 10 %; for 90 % it is the same.
    """

    questions: int  # of an image: 1, or from 1 to this number
    images: int
    by_seeds: dict[int, int]  # per cent, by number of seeds


# Simulated by tests/unit/test_intervals.py, as are the cases that are covered in 94 of 100 and more.
LOW_COVERAGE = [
    Coverage(1, 10, {1: 65, 2: 86, 3: 93, 5: 92}),
    Coverage(1, 20, {1: 88, 2: 97, 3: 97, 5: 97}),
    Coverage(1, 100, {1: 93, 2: 99, 3: 99, 5: 98}),
    Coverage(5, 10, {1: 84, 2: 95, 3: 94, 5: 93}),
    Coverage(5, 20, {1: 87, 2: 98, 3: 97, 5: 95}),
    Coverage(5, 100, {1: 93, 2: 99, 3: 98, 5: 98}),
]


def difference_table(differences: Estimates) -> tuple[list[str], list[dict]]:
    """Titles of the columns, one per group, and rows {"metric", "headline", "cells": [Cell or None]}."""
    groups = [name for name in GROUP_LABELS if name in differences and name != "reference"]
    measured = dict.fromkeys(metric for name in groups for metric in differences[name])
    ordered = [name for name in HEADLINES if name in measured] + [name for name in measured if name not in HEADLINES]
    rows = [
        {
            "metric": title(metric),
            "headline": metric in HEADLINES,
            "cells": [_cell(name, metric, differences[name].get(metric)) for name in groups],
        }
        for metric in ordered
    ]
    return [GROUP_LABELS[name] for name in groups], rows


def title(metric: str) -> str:
    if metric in HEADLINES:
        return HEADLINES[metric][0]
    return metric.replace("vqa_accuracy_", "VQA ").replace("_", " ")


def _cell(group: str, metric: str, difference: Estimate | None) -> Cell | None:
    if difference is None:
        return None
    shown = VERDICTS[verdict(metric, difference)] if group.endswith("/own") else ""
    return Cell(gain(metric, difference["mean"]), interval(metric, difference, gain), shown)
