"""The figures of all experiments: each one a row of comparison.csv, and tables of them for the page."""

import csv
from pathlib import Path

from files import replace_whole
from reporting.experiment import Experiment

COLUMNS = ("experiment", "group", "metric", "value", "low", "high", "n")
HEADLINES = {  # metric: title, what it means
    "vqa_accuracy": ("VQA accuracy", "held-out questions answered correctly"),
    "attribute_accuracy": ("Attribute accuracy", "colours, shapes and places that captions state correctly"),
    "clip_score": ("CLIPScore", "how well captions fit their images"),
    "ref_clip_score": ("RefCLIPScore", "how well they fit images and reference captions"),
}
GROUP_LABELS = {
    "finetune/own": "Fine-tuned",
    "finetune/shuffled": "Fine-tuned, shuffled images",
    "finetune/difference": "Fine-tuned, own − shuffled",
    "pretrain/own": "Pretrained",
    "pretrain/shuffled": "Pretrained, shuffled images",
    "pretrain/difference": "Pretrained, own − shuffled",
    "reference": "Reference captions",
}


def write_comparison(experiments: list[Experiment], path: str | Path) -> None:
    """One row per experiment, group and metric. The group `<model>/difference` is own − shuffled images, paired."""
    with replace_whole(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for experiment in experiments:
            for group, estimates in experiment.groups.items():
                for metric, estimate in estimates.items():
                    figures = [f"{estimate[key]:.6f}" for key in ("mean", "low", "high")]
                    writer.writerow([experiment.name, group, metric, *figures, estimate["n"]])


def is_share(metric: str) -> bool:
    """Shares go from 0 to 1 and are shown in per cent; the other metrics are scores or counts."""
    return "accuracy" in metric or metric == "exact_match"


def figure(metric: str, value: float) -> str:
    return (f"{100 * value:.1f} %" if is_share(metric) else f"{value:.3f}").replace("-", "−")


def gain(metric: str, value: float) -> str:
    """A difference, with its sign; shares in percentage points."""
    return (f"{100 * value:+.1f} points" if is_share(metric) else f"{value:+.3f}").replace("-", "−")


def interval(metric: str, estimate: dict) -> str:
    low, high = (figure(metric, estimate[key]).removesuffix(" %") for key in ("low", "high"))
    return f"{low} to {high}"


def metric_table(experiment: Experiment) -> tuple[list[str], list[dict]]:
    """All metrics of one experiment.

    Returns:
        Titles of the columns, one per group, and rows {"metric", "headline", "cells": [(value, interval) or None]},
        headline metrics first.
    """
    groups = [name for name in GROUP_LABELS if name in experiment.groups]
    measured = dict.fromkeys(metric for name in groups for metric in experiment.groups[name])
    ordered = [name for name in HEADLINES if name in measured] + [name for name in measured if name not in HEADLINES]
    rows = []
    for metric in ordered:
        cells = [_cell(name, metric, experiment.groups[name].get(metric)) for name in groups]
        title = (
            HEADLINES[metric][0] if metric in HEADLINES else metric.replace("vqa_accuracy_", "VQA ").replace("_", " ")
        )
        rows.append({"metric": title, "headline": metric in HEADLINES, "cells": cells})
    return [GROUP_LABELS[name] for name in groups], rows


def _cell(group: str, metric: str, estimate: dict | None) -> tuple[str, str] | None:
    if estimate is None:
        return None
    show = gain if group.endswith("/difference") else figure
    return show(metric, estimate["mean"]), interval(metric, estimate)
