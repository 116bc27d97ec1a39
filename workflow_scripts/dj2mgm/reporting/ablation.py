"""Ablation of a recipe's operators, as a table and a page.

All differences are complete recipe − recipe without the operator, that is, the operator's effect: −900 rows are rows
that it drops, +3 points are points that it adds.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from dj2mgm.errors import InputError
from dj2mgm.evaluation.caption_attributes import is_true
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.seeds import Estimates
from dj2mgm.files import read_jsonl
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.comparison import (
    GROUP_LABELS,
    HEADLINES,
    NO_DIFFERENCE,
    VERDICT_CLASSES,
    chance_note,
    coverage_note,
    describe_obstacles,
    difference_verdict,
    format_difference,
    format_interval,
    format_score,
    interval_ends,
    score_differences,
    verdict_scope,
)
from dj2mgm.reporting.experiment import ExperimentResults, RunResults
from dj2mgm.reporting.judges import judge_notes
from dj2mgm.reporting.rendering import format_number
from dj2mgm.reporting.variants_page import (
    CountCell,
    ScoreCell,
    VariantRow,
    VariantsPage,
    place_marker,
)

# (group, metric) of the scores in the table
SCORES = [
    ("pretrain/own", "clip_score"),
    ("pretrain/own", "attribute_accuracy"),
    ("finetune/own", "clip_score"),
    ("finetune/own", "attribute_accuracy"),
    ("finetune/own", "vqa_accuracy"),
]
SORTED_BY = [("finetune/own", "attribute_accuracy"), ("finetune/own", "clip_score")]  # by the first measured one
WORTH_COLUMNS = {"": "mean", "_low": "low", "_high": "high"}  # ending of a column: key of the estimate
RANDOM_ROWS = "all (as many random rows)"
CAPTION_FAULTS = {"mismatched", "junk_text", "short_text"}  # faults that a new caption can correct
REPEAT = re.compile(r"#\d+$")  # data/training_jsonl.py adds it to the ids of repeated rows


@dataclass(frozen=True)
class AblationRow:
    """Results of the complete recipe, or of the recipe without one operator; counts are means over the seeds."""

    name: str
    without: str  # the omitted operator; empty for the complete recipe
    seeds: int
    rows_filtered: float  # left after filter
    rows_synthesized: float | None  # left after synthesize
    faults: dict[str, float] | None  # planted faults in the training rows, by kind; None without ground truth
    scores: Estimates
    gains: Estimates  # complete − this, paired; empty for the complete recipe

    @property
    def faults_left(self) -> float | None:
        return None if self.faults is None else sum(self.faults.values())


def variants(experiments: list[ExperimentResults]) -> list[AblationRow]:
    """Return the complete recipe, then the others by the gain from their operator, largest first.

    The complete recipe comes first; the others' configurations have one more operator in `without`.
    """
    complete, *others = experiments
    measured = [
        _variant(other, _omitted_operator(other, complete), score_differences(complete, other)) for other in others
    ]
    measured.sort(key=_mean_gain, reverse=True)
    return [_variant(complete, "", {}), *measured]


def _variant(experiment: ExperimentResults, without: str, gains: Estimates) -> AblationRow:
    runs = experiment.runs
    synthesized = [run.synthesize["rows_kept"] for run in runs if run.synthesize]
    return AblationRow(
        name=experiment.name,
        without=without,
        seeds=len(runs),
        rows_filtered=float(np.mean([run.filter["rows_kept"] for run in runs])),
        rows_synthesized=float(np.mean(synthesized)) if synthesized else None,
        faults=_faults(experiment),
        scores=experiment.groups,
        gains=gains,
    )


def _omitted_operator(experiment: ExperimentResults, complete: ExperimentResults) -> str:
    if experiment.control:
        return RANDOM_ROWS
    known = complete.config.without
    if operators := [operator for operator in experiment.config.without if operator not in known]:
        return ", ".join(operators)
    raise InputError(
        f"{experiment.name} omits no operator of {complete.name}; name one under `without` in its configuration"
    )


def _mean_gain(variant: AblationRow) -> float:
    for group, metric in SORTED_BY:
        if estimate := variant.gains.get(group, {}).get(metric):
            return estimate["mean"]
    return 0.0


def _faults(experiment: ExperimentResults) -> dict[str, float] | None:
    file = experiment.dataset / "ground_truth.jsonl"
    if not file.is_file():
        return None
    truth = _ground_truth(file)
    counts = [faults_left(run, truth) for run in experiment.runs]
    kinds = sorted({row["fault"] for row in truth.values()} - {"clean"})
    return {kind: float(np.mean([count[kind] for count in counts])) for kind in kinds}


@cache
def _ground_truth(file: Path) -> dict[str, dict]:
    return {row["id"]: row for row in read_jsonl(file)}


def faults_left(run: RunResults, truth: dict[str, dict]) -> Counter[str]:
    """Count planted faults in the training rows of a run, by kind; a repeated row counts once.

    A replaced caption counts as corrected if the new one is true (evaluation/caption_attributes.py).
    """
    trained = {REPEAT.sub("", row["id"]) for row in _rows(run.stages["jsonl"] / "pretrain.jsonl", "write_jsonl")}
    recaptions = {}
    if "synthesize" in run.stages:
        rows = _rows(run.stages["synthesize"] / "synthesized.jsonl", "synthesize_captions")
        recaptions = {row["id"]: row["recaption"]["caption"] for row in rows if "recaption" in row}
    left: Counter[str] = Counter()
    for identifier in trained & set(truth):
        fault, true_caption = truth[identifier]["fault"], truth[identifier]["caption"]
        corrected = fault in CAPTION_FAULTS and is_true(recaptions.get(identifier, ""), true_caption)
        if fault != "clean" and not corrected:
            left[fault] += 1
    return left


def _rows(path: Path, rule: str) -> list[dict]:
    if not path.is_file():
        raise InputError(f"{path} is missing; run the rule {rule} first")
    return list(read_jsonl(path))


def tabulate(rows: list[AblationRow]) -> pd.DataFrame:
    """Return one row per variant, the complete recipe first.

    Columns: experiment, without, seeds, counts with `<count>_difference`, and scores `<group>_<metric>` with the gains
    `_worth`, `_worth_low` and `_worth_high`.
    """
    complete = rows[0]
    return pd.DataFrame([_record(row, complete) for row in rows])


def _record(variant: AblationRow, complete: AblationRow) -> dict:
    record: dict = {"experiment": variant.name, "without": variant.without, "seeds": variant.seeds}
    for name, own, reference in counts(variant, complete):
        record |= {name: own, f"{name}_difference": difference(own, reference) if variant.without else None}
    for group, metric in SCORES:
        name = f"{group.split('/')[0]}_{metric}"
        gain = find_estimate(variant.gains, group, metric)
        record[name] = find_estimate(variant.scores, group, metric).get("mean")
        record |= {f"{name}_worth{end}": gain.get(key) for end, key in WORTH_COLUMNS.items()}
    return record


def counts(variant: AblationRow, complete: AblationRow) -> list[tuple[str, float | None, float | None]]:
    """Return all counts as (name, this variant's, the complete recipe's)."""
    names = ("rows_filtered", "rows_synthesized", "faults_left")
    counted = [(name, getattr(variant, name), getattr(complete, name)) for name in names]
    kinds = complete.faults or {}
    return counted + [(f"faults_{kind}", (variant.faults or {}).get(kind), kinds[kind]) for kind in kinds]


def difference(own: float | None, reference: float | None) -> float | None:
    """Return complete − without; None if one of them was not counted."""
    return None if own is None or reference is None else reference - own


def find_estimate(estimates: Estimates, group: str, metric: str) -> Estimate:
    """Return the estimate; empty if it was not measured."""
    return estimates.get(group, {}).get(metric, {})


SUMMARY_COUNTS = {
    "rows_filtered": "Rows after filter",
    "rows_synthesized": "Rows after synthesize",
    "faults_left": "Planted faults left",
}


LEGEND = [
    "A hollow dot means that no difference is shown.",
    "Counts are those without the operator; the line below each count is the operator's effect.",
]


def page_notes(experiments: list[ExperimentResults]) -> list[str]:
    """Return sentences on scores that are not compared, and on the judge of captions."""
    complete, *others = experiments
    return [text for other in others for text in describe_obstacles(complete, other)] + judge_notes(experiments)[:1]


def build_page(variants: list[AblationRow], notes: list[str], title: str) -> VariantsPage:
    """Return the page; the notes stand above the table."""
    complete, *others = variants
    measured = [(group, metric) for group, metric in SCORES if find_estimate(complete.scores, group, metric)]
    counted = [name for name, own, _ in counts(complete, complete) if name in SUMMARY_COUNTS and own is not None]
    scales = {key: _scale(others, *key) for key in measured}
    judged = sum(bool(find_estimate(other.gains, *key)) for other in others for key in measured)
    rows = [
        VariantRow(
            variant.without,
            [_count(variant, complete, name) for name in counted],
            [_gain(variant, *key, scales[key]) for key in measured],
            f"faults: {faults}" if (faults := describe_faults(variant, complete)) else "",
        )
        for variant in others
    ]
    reference = VariantRow(
        "none (complete recipe)",
        [CountCell(format_mean_count(getattr(complete, name))) for name in counted],
        [_score(complete, *key) for key in measured],
        reference=True,
    )
    return VariantsPage(
        title,
        [*_introduction(variants), chance_note(judged, complete.seeds == 1), *notes, *LEGEND],
        "Omitted operator",
        [SUMMARY_COUNTS[name] for name in counted],
        [(HEADLINES[metric][0], GROUP_LABELS[group].lower()) for group, metric in measured],
        [reference, *rows],
        zero_line=True,
    )


def _introduction(variants: list[AblationRow]) -> list[str]:
    complete = variants[0]
    random = [
        f"“{RANDOM_ROWS}” is trained on as many rows as {complete.name}, drawn at random from those that the "
        "baseline's recipe keeps."
    ]
    return [
        f"Each row compares the recipe of {complete.name} with the same recipe without one operator, trained with "
        f"{'one seed' if complete.seeds == 1 else f'{complete.seeds} seeds'}.",
        "A gain is the score of the complete recipe minus the score without the operator, paired by seed and image, "
        "with its 95 % interval.",
        *(random if any(variant.without == RANDOM_ROWS for variant in variants) else []),
        coverage_note(complete.seeds),
    ]


def format_mean_count(value: float, signed: bool = False) -> str:
    """Format a mean count; small means that are not whole keep one digit."""
    return format_number(value, 0 if value == round(value) or abs(value) >= 100 else 1, signed)


def format_signed(value: float) -> str:
    return "±0" if value == 0 else format_mean_count(value, signed=True)


def _count(variant: AblationRow, complete: AblationRow, name: str) -> CountCell:
    """Return the count without the operator, and the operator's effect."""
    own, effect = getattr(variant, name), difference(getattr(variant, name), getattr(complete, name))
    if own is None or effect is None:
        return CountCell("–")
    return CountCell(format_mean_count(own), f"effect {format_signed(effect)}")


def describe_faults(variant: AblationRow, complete: AblationRow) -> str:
    """Describe the operator's effect by kind of fault, largest first: "mismatched −1 930, duplicate −12"."""
    changes = {
        name.removeprefix("faults_"): difference(own, reference) or 0
        for name, own, reference in counts(variant, complete)
        if name.startswith("faults_") and name != "faults_left"
    }
    kinds = sorted(changes, key=lambda kind: -abs(changes[kind]))
    return ", ".join(f"{kind.replace('_', ' ')} {format_signed(changes[kind])}" for kind in kinds if changes[kind])


def _score(variant: AblationRow, group: str, metric: str) -> ScoreCell:
    estimate = find_estimate(variant.scores, group, metric)
    return ScoreCell(format_score(metric, estimate["mean"]), [format_interval(metric, estimate)])


def _gain(variant: AblationRow, group: str, metric: str, scale: Scale) -> ScoreCell | None:
    """Return the operator's gain, and the score without the operator."""
    gain = find_estimate(variant.gains, group, metric)
    if not gain:
        return None
    shown = difference_verdict(metric, gain)
    words = shown + (verdict_scope(gain) if shown != NO_DIFFERENCE else "")
    text, interval = format_difference(metric, gain["mean"]), format_interval(metric, gain)
    without = format_score(metric, find_estimate(variant.scores, group, metric)["mean"])
    return ScoreCell(
        text,
        [interval, f"without it {without}"],
        VERDICT_CLASSES[shown],
        place_marker(scale, gain),
        f"{words}: {text}, 95 % interval: {interval}",
    )


def _scale(variants: list[AblationRow], group: str, metric: str) -> Scale:
    """Return the axis of a score, with 0 in the middle and the same for all operators."""
    gains = [gain for variant in variants if (gain := find_estimate(variant.gains, group, metric))]
    half = 1.05 * max((abs(end) for gain in gains for end in interval_ends(gain)), default=0.0) or 1.0
    return Scale(-half, half)
