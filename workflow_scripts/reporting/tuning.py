"""Ways to fine-tune side by side: what each scores, and what it costs in parameters, time and memory."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from evaluation.intervals import Estimate
from evaluation.seeds import Estimates, PerImage, Scores, paired_difference
from reporting.experiment import Experiment
from reporting.memory import read_stage_memory

GROUP = "finetune/own"
SCORES = ("attribute_accuracy", "clip_score", "vqa_accuracy")
KEPT = 0.9  # the share of the reference's score that the question is about


@dataclass(frozen=True)
class Tuning:
    """One experiment; costs are of its fine-tuning, means over the seeds but for memory, which is the highest."""

    name: str
    rank: int | None  # of LoRA; None: all of the language model is trained
    trained_parameters: int
    train_seconds: float
    host_gib: float
    gpu_gib: float | None  # None without a GPU
    scores: dict[str, Estimate]
    kept: dict[str, "Kept"]  # by score; empty for the reference


@dataclass(frozen=True)
class Kept:
    """How much of the reference's score is left."""

    share: float
    enough: bool | None  # at least KEPT of it; None: the 95 % interval does not say, or there is none


def tunings(experiments: list[Experiment]) -> list[Tuning]:
    """In the experiments' order, the reference first.

    Raises:
        InputError: runs that cannot be paired by seed and image.
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
    """Whether own − KEPT · reference, paired by seed and image, is above or below zero."""
    margins: Estimates = paired_difference(experiment.scores, [scaled(run, KEPT) for run in reference.scores])
    found = {}
    for score, margin in margins.get(GROUP, {}).items():
        full = reference.groups[GROUP][score]["mean"]
        if score in SCORES and full > 0:
            undecided = margin["low"] is None or margin["low"] < 0 <= margin["high"]
            share = experiment.groups[GROUP][score]["mean"] / full
            found[score] = Kept(share, None if undecided else margin["low"] >= 0)
    return found


def scaled(run: Scores, factor: float) -> Scores:
    """All values of a run times `factor`."""

    def times(values: PerImage) -> PerImage:
        return replace(values, sums=factor * values.sums)

    groups = {group: {name: times(one) for name, one in metrics.items()} for group, metrics in run.groups.items()}
    return replace(run, groups=groups)


def tabulate(rows: list[Tuning]) -> pd.DataFrame:
    """One row per tuning; of every score its mean, `_low`, `_high` and `_kept`, the share of the reference's."""
    return pd.DataFrame([_record(row) for row in rows])


def _record(row: Tuning) -> dict:
    costs = ("name", "rank", "trained_parameters", "train_seconds", "host_gib", "gpu_gib")
    record = {key: getattr(row, key) for key in costs}
    for score, estimate in row.scores.items():
        record |= {score: estimate["mean"], f"{score}_low": estimate["low"], f"{score}_high": estimate["high"]}
        record[f"{score}_kept"] = row.kept[score].share if score in row.kept else None
    return record
