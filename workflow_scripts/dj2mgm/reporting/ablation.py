"""What each operator of a recipe is worth, as a table and a page."""

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
from dj2mgm.files import read_jsonl, write_text
from dj2mgm.reporting.comparable import obstacles, score_differences
from dj2mgm.reporting.comparison import (
    GROUP_LABELS,
    HEADLINES,
    NO_DIFFERENCE,
    chance_note,
    ends,
    figure,
    gain,
    interval,
    scope,
    verdict,
)
from dj2mgm.reporting.drawing import environment
from dj2mgm.reporting.experiment import Experiment, RunResults
from dj2mgm.reporting.judges import judge_notes

# Every difference is complete − without it, so it is what the operator brings: −900 rows are rows that it removes,
# +3 points are points that it gains.

# (group, metric) of the scores that are tabulated
SCORES = [
    ("pretrain/own", "clip_score"),
    ("pretrain/own", "attribute_accuracy"),
    ("finetune/own", "clip_score"),
    ("finetune/own", "attribute_accuracy"),
    ("finetune/own", "vqa_accuracy"),
]
SORTED_BY = [("finetune/own", "attribute_accuracy"), ("finetune/own", "clip_score")]  # the first that was measured
WORTH_COLUMNS = {"": "mean", "_low": "low", "_high": "high"}  # ending of a column: key of the estimate
CAPTION_FAULTS = {"mismatched", "junk_text", "short_text"}  # what another caption can correct
REPEAT = re.compile(r"#\d+$")  # what data/training_jsonl.py adds to the ids of repeated rows


@dataclass(frozen=True)
class AblationRow:
    """The complete recipe, or the recipe without an operator; counts are means over the seeds."""

    name: str
    without: str  # operator left out; empty for the complete recipe
    seeds: int
    rows_filtered: float  # left after filter
    rows_synthesized: float | None  # left after synthesize
    faults: dict[str, float] | None  # planted faults among the rows trained on, by kind; None without ground truth
    scores: Estimates
    worth: Estimates  # complete − this, paired; empty for the complete recipe

    @property
    def faults_left(self) -> float | None:
        return None if self.faults is None else sum(self.faults.values())


def variants(experiments: list[Experiment]) -> list[AblationRow]:
    """The complete recipe, then the others by what their operator is worth, most valuable first.

    Args:
        experiments: the complete recipe first; the others' configurations name one operator more in `without`.

    Raises:
        InputError: an experiment leaves out no operator; runs that cannot be paired; synthesized.jsonl is missing.
    """
    complete, *others = experiments
    measured = [
        _variant(other, _omitted_operator(other, complete), score_differences(complete, other)) for other in others
    ]
    measured.sort(key=_worth, reverse=True)
    return [_variant(complete, "", {}), *measured]


def _variant(experiment: Experiment, without: str, worth: Estimates) -> AblationRow:
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
        worth=worth,
    )


def _omitted_operator(experiment: Experiment, complete: Experiment) -> str:
    known = complete.config.get("without", [])
    if operators := [operator for operator in experiment.config.get("without", []) if operator not in known]:
        return ", ".join(operators)
    raise InputError(
        f"{experiment.name} leaves out no operator that {complete.name} has; "
        "name one under `without` in its configuration"
    )


def _worth(variant: AblationRow) -> float:
    for group, metric in SORTED_BY:
        if estimate := variant.worth.get(group, {}).get(metric):
            return estimate["mean"]
    return 0.0


def _faults(experiment: Experiment) -> dict[str, float] | None:
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
    """Planted faults among the rows that a run trained on, by kind; a repeated row counts once.

    A faulty caption that was replaced counts as corrected if the new one is true (evaluation/caption_attributes.py).

    Raises:
        InputError: a file is missing.
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
        raise InputError(f"{path} does not exist; run the rule {rule} first")
    return list(read_jsonl(path))


def tabulate(rows: list[AblationRow]) -> pd.DataFrame:
    """One row per variant, the complete recipe first.

    Columns: experiment, without, seeds, counts with `<count>_difference`, and for every score `<group>_<metric>` with
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
        worth = estimate_of(variant.worth, group, metric)
        record[name] = estimate_of(variant.scores, group, metric).get("mean")
        record |= {f"{name}_worth{end}": worth.get(key) for end, key in WORTH_COLUMNS.items()}
    return record


def counts(variant: AblationRow, complete: AblationRow) -> list[tuple[str, float | None, float | None]]:
    """(name, this variant's, the complete recipe's) of everything that is counted."""
    names = ("rows_filtered", "rows_synthesized", "faults_left")
    counted = [(name, getattr(variant, name), getattr(complete, name)) for name in names]
    kinds = complete.faults or {}
    return counted + [(f"faults_{kind}", (variant.faults or {}).get(kind), kinds[kind]) for kind in kinds]


def difference(own: float | None, reference: float | None) -> float | None:
    """Complete − without, where both were counted."""
    return None if own is None or reference is None else reference - own


def estimate_of(estimates: Estimates, group: str, metric: str) -> Estimate:
    """The estimate, or an empty one where it was not measured."""
    return estimates.get(group, {}).get(metric, {})


# The same as one small page.

SUMMARY_COUNTS = {
    "rows_filtered": "Rows after filter",
    "rows_synthesized": "Rows after synthesize",
    "faults_left": "Planted faults left",
}
VERDICT_CLASSES = {"better": "better", "worse": "worse", NO_DIFFERENCE: "same"}


def page_notes(experiments: list[Experiment]) -> list[str]:
    """Sentences on what cannot be compared, and on what the scores of CLIP are worth."""
    complete, *others = experiments
    not_compared = [sentence for other in others for sentence in obstacles(complete, other)]
    return [*not_compared, judge_notes(experiments)[0]]


def write_page(variants: list[AblationRow], notes: list[str], path: str | Path) -> None:
    """Write one file without scripts that fetches nothing; the notes stand above the table."""
    complete, *others = variants
    measured = [(group, metric) for group, metric in SCORES if estimate_of(complete.scores, group, metric)]
    counted = [name for name, own, _ in counts(complete, complete) if name in SUMMARY_COUNTS and own is not None]
    scales = {key: _scale(others, *key) for key in measured}
    judged = sum(bool(estimate_of(other.worth, *key)) for other in others for key in measured)
    page = (
        environment()
        .get_template("ablation.html.j2")
        .render(
            complete=complete,
            notes=[chance_note(judged, complete.seeds == 1), *notes],
            count_titles=[SUMMARY_COUNTS[name] for name in counted],
            score_titles=[(HEADLINES[metric][0], GROUP_LABELS[group].lower()) for group, metric in measured],
            complete_counts=[count_text(getattr(complete, name)) for name in counted],
            complete_scores=[_value(complete, *key) for key in measured],
            rows=[
                {
                    "operator": variant.without,
                    "counts": [_count(variant, complete, name) for name in counted],
                    "faults": fault_text(variant, complete),
                    "scores": [_score(variant, *key, scales[key]) for key in measured],
                }
                for variant in others
            ],
        )
    )
    write_text(path, page)


def count_text(value: float) -> str:
    """12345.0 → "12 345" with narrow spaces; a small mean over seeds keeps one digit."""
    text = f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"
    return text.replace(",", "\u202f").replace("-", "−")


def signed(value: float) -> str:
    return "±0" if value == 0 else ("+" if value > 0 else "") + count_text(value)


def _count(variant: AblationRow, complete: AblationRow, name: str) -> tuple[str, str]:
    """What is left without the operator, and what the operator changes."""
    own, brought = getattr(variant, name), difference(getattr(variant, name), getattr(complete, name))
    return ("–", "") if own is None or brought is None else (count_text(own), signed(brought))


def fault_text(variant: AblationRow, complete: AblationRow) -> str:
    """ "mismatched −1 930, duplicate −12": what the operator changes, by kind, largest first."""
    changes = {
        name.removeprefix("faults_"): difference(own, reference) or 0
        for name, own, reference in counts(variant, complete)
        if name.startswith("faults_") and name != "faults_left"
    }
    kinds = sorted(changes, key=lambda kind: -abs(changes[kind]))
    return ", ".join(f"{kind.replace('_', ' ')} {signed(changes[kind])}" for kind in kinds if changes[kind])


def _value(variant: AblationRow, group: str, metric: str) -> tuple[str, str]:
    estimate = estimate_of(variant.scores, group, metric)
    return figure(metric, estimate["mean"]), interval(metric, estimate)


def _score(variant: AblationRow, group: str, metric: str, scale: float) -> dict | None:
    """The operator's worth as text and as places in per cent of an axis from −scale to scale."""
    worth = estimate_of(variant.worth, group, metric)
    if not worth:
        return None
    marked = zip(("mean", "low", "high"), (worth["mean"], *ends(worth)), strict=True)
    places = {key: round(50 + 50 * value / scale, 2) for key, value in marked}
    shown = verdict(metric, worth)
    return {
        "worth": gain(metric, worth["mean"]),
        "interval": interval(metric, worth),
        "value": figure(metric, estimate_of(variant.scores, group, metric)["mean"]),
        "verdict": shown + (scope(worth) if shown != NO_DIFFERENCE else ""),
        "class": VERDICT_CLASSES[shown],
        "places": places,
    }


def _scale(variants: list[AblationRow], group: str, metric: str) -> float:
    """Half the length of a score's axis, the same for all operators so that they can be compared."""
    worths = [worth for variant in variants if (worth := estimate_of(variant.worth, group, metric))]
    return 1.05 * max((abs(end) for worth in worths for end in ends(worth)), default=0.0) or 1.0
