"""Table of a study's variants: rows, costs, scores and differences from the reference, with charts around it.

All differences are variant − reference: if the variant without an operator has −3 points, the operator adds 3 points.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from dj2mgm.cli.messages import format_duration
from dj2mgm.evaluation.caption_attributes import is_true
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import (
    GroupEstimates,
    MetricValues,
    RunScores,
    aggregate,
    estimate_paired_difference,
    pair_runs_by_seed,
)
from dj2mgm.features.studies.study_records import ShownStudy
from dj2mgm.reporting.comparison import HEADLINES, HeadlineScore, compute_score_differences, select_comparable_scores
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import format_number
from dj2mgm.reporting.sections.training_charts import read_stage_memory
from dj2mgm.reporting.variants_page import IntervalMark, VariantsPage
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.verdict_cards import find_cost
from dj2mgm.score_groups import OWN, OWN_GROUP, PRETRAINED, name_group
from dj2mgm.storage.files import read_jsonl

PRETRAINED_GROUP = name_group(PRETRAINED, OWN)
# (group, metric) of the scores in the table, after the headline
TABLE_SCORES = [
    (OWN_GROUP, "attribute_accuracy"),
    (OWN_GROUP, "clip_score"),
    (OWN_GROUP, "vqa_accuracy"),
    (PRETRAINED_GROUP, "attribute_accuracy"),
    (PRETRAINED_GROUP, "clip_score"),
]
CAPTION_FAULTS = {"mismatched", "junk_text", "short_text"}  # faults that a new caption can correct
REPETITION_SUFFIX = re.compile(r"#\d+$")  # data/training_jsonl.py adds it to the ids of repeated rows
FAULT_PREFIX = "faults_"  # prefix of the count of each kind of fault


@dataclass(frozen=True)
class CostPoint:
    """A variant in the chart of costs."""

    time: float  # percent of the axis
    score: IntervalMark
    label: str
    reference: bool
    front: bool  # whether no variant has a better score for less time


@dataclass(frozen=True)
class CostChart:
    """Scores against costs."""

    title: str  # name of the score
    points: list[CostPoint]
    labels: list[str]  # ends of the axis of scores, end of the axis of times


@dataclass(frozen=True)
class TrialLine:
    """A trial in the plot of parallel coordinates."""

    points: list[tuple[float, float]]  # number of the axis, and percent from the top
    label: str
    best: bool  # whether it is among the best quarter


@dataclass(frozen=True)
class ParallelPlot:
    """Settings and scores of trials: an axis for each setting, and one for the score."""

    axes: list[tuple[str, str, str]]  # name, lowest and highest value
    lines: list[TrialLine]  # the best last, on top of the others


@dataclass(frozen=True)
class PlainTable:
    """A small table below the table of variants."""

    title: str
    note: str  # sentences above it
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class StudyPageContent(VariantsPage):
    """A page of variants with charts above the table, and with tables and commands below it."""

    chart: CostChart | None = None
    parallels: ParallelPlot | None = None
    tables: list[PlainTable] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # to confirm the best trial of a search
    template: ClassVar[Path] = Path(__file__).with_name("study.html.j2")


@dataclass(frozen=True)
class ComparedVariant:
    """A variant, or the reference."""

    experiment: ExperimentResults
    counts: dict[str, float | None]  # means over the seeds, in the order of COUNT_COLUMNS; None: not measured
    differences: GroupEstimates = field(default_factory=dict)  # differences from the reference; empty for the reference
    kept_scores: dict[str, "KeptScore"] = field(default_factory=dict)  # by metric

    @property
    def name(self) -> str:
        return self.experiment.name


@dataclass(frozen=True)
class KeptScore:
    """The share of the reference's score that a variant keeps."""

    share: float
    enough: bool | None  # whether it is at least the study's `keeps`; None if the 95 % interval leaves it open


def format_count(value: float, signed: bool = False) -> str:
    """Format a mean count; small means that are not whole keep one digit."""
    return format_number(value, 0 if value == round(value) or abs(value) >= 100 else 1, signed)


def _convert_to_gib(value: float) -> str:
    return f"{value:.2f} GiB"


COUNT_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {  # title, format
    "rows_filtered": ("Rows after filter", format_count),
    "rows_synthesized": ("Rows after synthesize", format_count),
    "faults_left": ("Planted faults left", format_count),
    "trained_parameters": ("Parameters trained", format_count),
    "seconds": ("Time of all stages", format_duration),
    "gpu_gib": ("Peak GPU memory", _convert_to_gib),
    "host_gib": ("Peak host memory", _convert_to_gib),
}


def compare_variants(assessment: Assessment, study: ShownStudy) -> list[ComparedVariant]:
    """Return the reference, then its variants by the headline, best first."""
    reference, *variants = assessment.experiments
    headline, rows = assessment.headline, []
    for variant in variants:
        kept_scores = compute_retained_shares(variant, reference, study.page.keeps) if study.page.keeps else {}
        differences = compute_score_differences(variant, reference)
        rows.append(ComparedVariant(variant, count_rows_and_costs(variant), differences, kept_scores))
    keys = [(headline.group, headline.metric), *TABLE_SCORES]
    rows.sort(
        key=lambda row: next((estimate.mean for key in keys if (estimate := find_estimate(row.differences, key))), 0.0)
    )
    return [
        ComparedVariant(reference, count_rows_and_costs(reference)),
        *(rows if headline.lower_is_better else reversed(rows)),
    ]


def count_rows_and_costs(experiment: ExperimentResults) -> dict[str, float | None]:
    """Return rows, planted faults and costs of an experiment: means over the seeds; for memory, the highest reading."""
    runs = experiment.runs
    faults, records = average_faults(experiment), [run.records["finetune"] for run in runs]
    memory = [read_stage_memory(run, "finetune") for run in runs]
    return {
        "rows_filtered": _compute_mean([run.filter.rows_kept for run in runs]),
        "rows_synthesized": _compute_mean([run.synthesize.rows_kept for run in runs if run.synthesize]),
        "faults_left": None if faults is None else sum(faults.values()),
        "trained_parameters": _compute_mean([record.trained_parameters for record in records]),
        "seconds": find_cost(experiment),
        "gpu_gib": max((reading.find_peak("gpu") for reading in memory if "gpu" in reading.sizes), default=None),
        "host_gib": max(reading.find_peak("host") for reading in memory),
    } | {f"{FAULT_PREFIX}{kind}": number for kind, number in (faults or {}).items()}


def _compute_mean(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return float(np.mean(measured)) if measured else None


def average_faults(experiment: ExperimentResults) -> dict[str, float] | None:
    """Return planted faults in the training rows by kind, as means over the seeds; None without ground truth."""
    file = experiment.dataset / "ground_truth.jsonl"
    if not file.is_file():
        return None
    truth = _read_ground_truth(file)
    counts = [count_remaining_faults(run, truth) for run in experiment.runs]
    kinds = sorted({row["fault"] for row in truth.values()} - {"clean"})
    return {kind: float(np.mean([count[kind] for count in counts])) for kind in kinds}


@cache
def _read_ground_truth(file: Path) -> dict[str, dict]:
    return {row["id"]: row for row in read_jsonl(file)}


def count_remaining_faults(run: RunResults, truth: dict[str, dict]) -> Counter[str]:
    """Count planted faults in the training rows of a run, by kind; a repeated row counts once.

    A replaced caption counts as corrected if the new one is true (evaluation/caption_attributes.py).
    """
    trained = {REPETITION_SUFFIX.sub("", row["id"]) for row in read_jsonl(run.stages["jsonl"] / "pretrain.jsonl")}
    recaptions = {}
    if "synthesize" in run.stages:
        rows = read_jsonl(run.stages["synthesize"] / "synthesized.jsonl")
        recaptions = {row["id"]: row["recaption"]["caption"] for row in rows if "recaption" in row}
    left: Counter[str] = Counter()
    for identifier in trained & set(truth):
        fault, true_caption = truth[identifier]["fault"], truth[identifier]["caption"]
        corrected = fault in CAPTION_FAULTS and is_true(recaptions.get(identifier, ""), true_caption)
        if fault != "clean" and not corrected:
            left[fault] += 1
    return left


def compute_retained_shares(
    experiment: ExperimentResults, reference: ExperimentResults, minimum: float
) -> dict[str, KeptScore]:
    """Return the kept share of each fine-tuned score over the shared seeds, and whether it is at least `minimum`.

    The interval of own − minimum · reference, paired by seed and image, decides.
    """
    sides = select_comparable_scores(experiment, reference)
    margins = estimate_paired_difference(sides[0], [scale_scores(run, minimum) for run in sides[1]]).get(OWN_GROUP, {})
    if not margins:
        return {}
    own_estimates, reference_estimates = (
        aggregate(list(runs))[OWN_GROUP] for runs in zip(*pair_runs_by_seed(*sides), strict=True)
    )
    shares = {}
    for metric, margin in margins.items():
        if metric in HEADLINES and reference_estimates[metric].mean > 0:
            undecided = margin.low is None or margin.low < 0 <= margin.high
            share = own_estimates[metric].mean / reference_estimates[metric].mean
            shares[metric] = KeptScore(share, None if undecided else margin.low >= 0)
    return shares


def scale_scores(run: RunScores, factor: float) -> RunScores:
    """Multiply all values of a run by `factor`."""

    def scale(values: MetricValues) -> MetricValues:
        return replace(values, sums=factor * values.sums)

    groups = {group: {name: scale(values) for name, values in metrics.items()} for group, metrics in run.groups.items()}
    return replace(run, groups=groups)


def find_estimate(estimates: GroupEstimates, key: tuple[str, str]) -> Estimate | None:
    """Return the estimate of a group and metric; None if it was not measured."""
    return estimates.get(key[0], {}).get(key[1])


def select_table_scores(rows: list[ComparedVariant], headline: HeadlineScore) -> list[tuple[str, str]]:
    """Return group and metric of each score in the table: first the headline, then scores that differ by variant."""
    headline_key = headline.group, headline.metric
    means_by_key = {
        key: [estimate.mean for row in rows if (estimate := find_estimate(row.experiment.groups, key))]
        for key in dict.fromkeys([headline_key, *TABLE_SCORES])
    }
    return [key for key, means in means_by_key.items() if len({*means}) > 1 or (means and key[0] != PRETRAINED_GROUP)]


def tabulate(rows: list[ComparedVariant], headline: HeadlineScore) -> pd.DataFrame:
    """Return a row per variant, the reference first.

    Columns: experiment, seeds, each changed setting, counts, and scores `<stage>_<metric>` with `_low`, `_high`,
    `_difference`, `_difference_low`, `_difference_high` and `_kept`.
    """
    scores, counts = select_table_scores(rows, headline), {name: None for row in rows for name in row.counts}
    records = []
    for row in rows:
        record: dict[str, Any] = {"experiment": row.name, "seeds": len(row.experiment.runs)}
        record |= row.experiment.changes | {name: row.counts.get(name) for name in counts}
        for group, metric in scores:
            name = f"{group.removesuffix(f'/{OWN}').replace('/', '_')}_{metric}"
            for suffix, estimates in (("", row.experiment.groups), ("_difference", row.differences)):
                estimate = find_estimate(estimates, (group, metric))
                figures = (estimate.mean, estimate.low, estimate.high) if estimate else (None,) * 3
                record |= zip((f"{name}{suffix}{end}" for end in ("", "_low", "_high")), figures, strict=True)
            record[f"{name}_kept"] = (
                row.kept_scores[metric].share if group == OWN_GROUP and metric in row.kept_scores else None
            )
        records.append(record)
    return pd.DataFrame(records)
