"""Comparison of fine-tuning methods: scores and costs, as a table and a page."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.seeds import PerImage, Scores, aggregate, paired_difference, same_seeds
from dj2mgm.files import write_text
from dj2mgm.messages import duration
from dj2mgm.reporting.comparable import comparable_scores, describe_obstacles
from dj2mgm.reporting.comparison import HEADLINES, chance_note, format_interval, format_score, interval_ends
from dj2mgm.reporting.curves import read_stage_memory
from dj2mgm.reporting.drawing import Scale, format_integer, template_environment
from dj2mgm.reporting.experiment import Experiment

GROUP = "finetune/own"
SCORES = ("attribute_accuracy", "clip_score", "vqa_accuracy")
KEPT = 0.9  # share of the reference's score; the page states whether a method keeps at least this share


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning of one experiment; times are means over the seeds, memory is the highest reading."""

    name: str
    rank: int | None  # of LoRA; None for full fine-tuning
    trained_parameters: int
    train_seconds: float
    host_gib: float
    gpu_gib: float | None  # None without a GPU
    scores: dict[str, Estimate]
    kept: dict[str, "Kept"]  # by score; empty for the reference


@dataclass(frozen=True)
class Kept:
    """The share of the reference's score that a method keeps."""

    share: float
    enough: bool | None  # whether it is at least KEPT; None if the 95 % interval leaves it open


def tunings(experiments: list[Experiment]) -> list[Tuning]:
    """Return the fine-tuning of each experiment, the reference first.

    Raises:
        InputError: runs cannot be paired by seed and image.
    """
    reference, *others = experiments
    return [_tuning(reference, {}), *(_tuning(other, kept(other, reference)) for other in others)]


def _tuning(experiment: Experiment, kept_scores: dict[str, Kept]) -> Tuning:
    records = [run.records["finetune"] for run in experiment.runs]
    memory = [read_stage_memory(run, "finetune") for run in experiment.runs]
    measured = experiment.groups.get(GROUP, {})
    return Tuning(
        name=experiment.name,
        rank=lora["r"] if (lora := experiment.config["finetune"]["lora"]) else None,
        trained_parameters=records[0]["trained_parameters"],
        train_seconds=float(np.mean([record["train_seconds"] for record in records])),
        host_gib=max(one.peak("host") for one in memory),
        gpu_gib=max((one.peak("gpu") for one in memory if "gpu" in one.sizes), default=None),
        scores={score: measured[score] for score in SCORES if score in measured},
        kept=kept_scores,
    )


def kept(experiment: Experiment, reference: Experiment) -> dict[str, Kept]:
    """Return the kept share of each score over the shared seeds, and whether it is at least KEPT.

    The interval of own − KEPT · reference, paired by seed and image, decides.
    """
    sides = comparable_scores(experiment, reference)
    margins = paired_difference(sides[0], [scale_scores(run, KEPT) for run in sides[1]]).get(GROUP, {})
    if not margins:
        return {}
    own, full = (aggregate(list(runs))[GROUP] for runs in zip(*same_seeds(*sides), strict=True))
    shares = {}
    for score, margin in margins.items():
        if score in SCORES and full[score]["mean"] > 0:
            undecided = margin["low"] is None or margin["low"] < 0 <= margin["high"]
            share = own[score]["mean"] / full[score]["mean"]
            shares[score] = Kept(share, None if undecided else margin["low"] >= 0)
    return shares


def scale_scores(run: Scores, factor: float) -> Scores:
    """Multiply all values of a run by `factor`."""

    def times(values: PerImage) -> PerImage:
        return replace(values, sums=factor * values.sums)

    groups = {group: {name: times(one) for name, one in metrics.items()} for group, metrics in run.groups.items()}
    return replace(run, groups=groups)


def tabulate(rows: list[Tuning]) -> pd.DataFrame:
    """Return a row per method, with the mean, `_low`, `_high` and `_kept` (share of the reference's) of each score."""
    return pd.DataFrame([_record(row) for row in rows])


def _record(row: Tuning) -> dict:
    costs = ("name", "rank", "trained_parameters", "train_seconds", "host_gib", "gpu_gib")
    record = {key: getattr(row, key) for key in costs}
    for score, estimate in row.scores.items():
        record |= {score: estimate["mean"], f"{score}_low": estimate["low"], f"{score}_high": estimate["high"]}
        record[f"{score}_kept"] = row.kept[score].share if score in row.kept else None
    return record


COSTS = {  # title, text
    "trained_parameters": ("Parameters trained", format_integer),
    "train_seconds": ("Time", duration),
    "gpu_gib": ("Peak GPU memory", "{:.2f} GiB".format),
    "host_gib": ("Peak host memory", "{:.2f} GiB".format),
}
SHARE = f"{100 * KEPT:.0f} %"
VERDICTS = {True: ("better", "yes"), False: ("worse", "no"), None: ("same", "not shown")}  # class, text


def page_notes(experiments: list[Experiment]) -> list[str]:
    """Return sentences on scores that are not compared."""
    reference, *others = experiments
    return [sentence for other in others for sentence in describe_obstacles(other, reference)]


def write_page(rows: list[Tuning], notes: list[str], title: str, path: str | Path) -> None:
    """Write one self-contained HTML file without scripts; the notes stand above the table."""
    costs = [key for key in COSTS if any(getattr(row, key) is not None for row in rows)]
    scores = list(rows[0].scores)
    seeds = max((score["seeds"] for row in rows for score in row.scores.values()), default=0)
    scales = {score: _scale([row.scores[score] for row in rows if score in row.scores]) for score in scores}
    page = (
        template_environment()
        .get_template("tuning.html.j2")
        .render(
            title=title,
            reference=rows[0].name,
            notes=[chance_note(sum(len(row.kept) for row in rows), seeds == 1), *notes],
            seeds=seeds,
            share=SHARE,
            cost_titles=[COSTS[key][0] for key in costs],
            score_titles=[HEADLINES[score][0] for score in scores],
            rows=[
                {
                    "name": row.name,
                    "costs": [_cost(rows, row, key) for key in costs],
                    "scores": [_score(row, score, scales[score]) for score in scores],
                }
                for row in rows
            ],
        )
    )
    write_text(path, page)


def _cost(rows: list[Tuning], row: Tuning, key: str) -> tuple[str, float]:
    """Return a cost as text, and in per cent of the highest cost."""
    value, most = getattr(row, key), max(getattr(other, key) or 0 for other in rows)
    return ("–", 0.0) if value is None else (COSTS[key][1](value), round(100 * value / most, 2) if most else 0.0)


def _scale(estimates: list[Estimate]) -> Scale:
    low, high = min(interval_ends(one)[0] for one in estimates), max(interval_ends(one)[1] for one in estimates)
    margin = 0.05 * (high - low) or 0.01
    return Scale(low - margin, high + margin)


def _score(row: Tuning, score: str, scale: Scale) -> dict | None:
    """Return the score, its places in per cent of an axis that all rows share, and the kept share."""
    if score not in row.scores:
        return None
    estimate = row.scores[score]
    shown = {
        "value": format_score(score, estimate["mean"]),
        "interval": format_interval(score, estimate),
        "places": dict(
            zip(("mean", "low", "high"), map(scale.at, (estimate["mean"], *interval_ends(estimate))), strict=True)
        ),
    }
    return shown | _kept(row.kept.get(score))


def _kept(kept: Kept | None) -> dict:
    if kept is None:
        return {"class": "same", "kept": []}
    style, words = VERDICTS[kept.enough]
    return {"class": style, "kept": [f"{100 * kept.share:.1f} % kept", f"at least {SHARE}: {words}"]}
