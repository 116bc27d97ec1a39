"""The differences of all metrics to the reference, as a table."""

from dataclasses import dataclass

from evaluation.seeds import Estimate, Estimates
from reporting.comparison import GROUP_LABELS, HEADLINES, gain, verdict
from reporting.panels import VERDICTS


@dataclass(frozen=True)
class Cell:
    text: str
    interval: str
    verdict: str  # better, worse or same; empty for controls, which nothing should improve


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
    low, high = (gain(metric, difference[key]).removesuffix(" points") for key in ("low", "high"))
    shown = VERDICTS[verdict(metric, difference)] if group.endswith("/own") else ""
    return Cell(gain(metric, difference["mean"]), f"{low} to {high}", shown)
