"""Comparison of fine-tuning methods: scores and costs, as a table and a page."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.seeds import PerImage, Scores, aggregate, paired_difference, same_seeds
from dj2mgm.messages import format_duration
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.comparison import (
    HEADLINES,
    chance_note,
    comparable_scores,
    coverage_note,
    describe_obstacles,
    format_interval,
    format_score,
    interval_ends,
)
from dj2mgm.reporting.experiment import ExperimentResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.training_charts import read_stage_memory
from dj2mgm.reporting.variants_page import (
    CountCell,
    ScoreCell,
    VariantRow,
    VariantsPage,
    place_marker,
)

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


def variants(experiments: list[ExperimentResults]) -> list[Tuning]:
    """Return the fine-tuning of each experiment, the reference first."""
    reference, *others = experiments
    return [_tuning(reference, {}), *(_tuning(other, kept(other, reference)) for other in others)]


def _tuning(experiment: ExperimentResults, kept_scores: dict[str, Kept]) -> Tuning:
    records = [run.records["finetune"] for run in experiment.runs]
    memory = [read_stage_memory(run, "finetune") for run in experiment.runs]
    measured = experiment.groups.get(GROUP, {})
    return Tuning(
        name=experiment.name,
        rank=lora.r if (lora := experiment.config.finetune.lora) else None,
        trained_parameters=records[0]["trained_parameters"],
        train_seconds=float(np.mean([record["train_seconds"] for record in records])),
        host_gib=max(one.peak("host") for one in memory),
        gpu_gib=max((one.peak("gpu") for one in memory if "gpu" in one.sizes), default=None),
        scores={score: measured[score] for score in SCORES if score in measured},
        kept=kept_scores,
    )


def kept(experiment: ExperimentResults, reference: ExperimentResults) -> dict[str, Kept]:
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
    "train_seconds": ("Time", format_duration),
    "gpu_gib": ("Peak GPU memory", "{:.2f} GiB".format),
    "host_gib": ("Peak host memory", "{:.2f} GiB".format),
}
SHARE = f"{100 * KEPT:.0f} %"
VERDICTS = {True: ("better", "yes"), False: ("worse", "no"), None: ("same", "not shown")}  # class, text


def page_notes(experiments: list[ExperimentResults]) -> list[str]:
    """Return sentences on scores that are not compared."""
    reference, *others = experiments
    return [sentence for other in others for sentence in describe_obstacles(other, reference)]


def build_page(rows: list[Tuning], notes: list[str], title: str) -> VariantsPage:
    """Return the page; the notes stand above the table."""
    costs = [key for key in COSTS if any(getattr(row, key) is not None for row in rows)]
    scores = list(rows[0].scores)
    seeds = max((score["seeds"] for row in rows for score in row.scores.values()), default=0)
    scales = {score: _scale([row.scores[score] for row in rows if score in row.scores]) for score in scores}
    introduction = [
        f"Fine-tuning methods on the same data, compared with {rows[0].name}, the reference.",
        "Scores are those of the fine-tuned models on held-out images, with 95 % intervals.",
        f"A method keeps at least {SHARE} of the reference's score if the 95 % interval of its score minus {SHARE} of "
        "the reference's score, paired by seed and image, is above 0; “not shown” means that the interval contains 0.",
        "Comparisons use the seeds that both have.",
        "Memory is the highest reading; time is that of the whole stage.",
    ]
    chance = chance_note(sum(len(row.kept) for row in rows), seeds == 1)
    return VariantsPage(
        title,
        [*introduction, chance, *notes, coverage_note(seeds)],
        "Experiment",
        [COSTS[key][0] for key in costs],
        [(HEADLINES[score][0], "") for score in scores],
        [
            VariantRow(
                row.name,
                [_cost(rows, row, key) for key in costs],
                [_score(row, score, scales[score]) for score in scores],
                "reference" if row is rows[0] else "",
                reference=row is rows[0],
            )
            for row in rows
        ],
    )


def _cost(rows: list[Tuning], row: Tuning, key: str) -> CountCell:
    """Return a cost, with a bar in per cent of the highest cost."""
    value, most = getattr(row, key), max(getattr(other, key) or 0 for other in rows)
    if value is None:
        return CountCell("–", bar=0.0)
    return CountCell(COSTS[key][1](value), bar=round(100 * value / most, 2) if most else 0.0)


def _scale(estimates: list[Estimate]) -> Scale:
    low, high = min(interval_ends(one)[0] for one in estimates), max(interval_ends(one)[1] for one in estimates)
    margin = 0.05 * (high - low) or 0.01
    return Scale(low - margin, high + margin)


def _score(row: Tuning, score: str, scale: Scale) -> ScoreCell | None:
    """Return the score on an axis that all rows share, and the kept share of the reference's score."""
    if score not in row.scores:
        return None
    estimate, kept = row.scores[score], row.kept.get(score)
    text, interval = format_score(score, estimate["mean"]), format_interval(score, estimate)
    verdict, answer = VERDICTS[kept.enough if kept else None]
    lines = [f"{100 * kept.share:.1f} % kept", f"at least {SHARE}: {answer}"] if kept else []
    label = f"{text}, 95 % interval: {interval}"
    return ScoreCell(text, [interval, *lines], verdict, place_marker(scale, estimate), label)
