"""What each operator of a recipe is worth: the complete recipe beside the same recipe without that operator.

Every difference is complete − without it, so it is what the operator brings: −900 rows are rows that it removes,
+3 points are points that it gains.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from errors import InputError
from evaluation.caption_attributes import is_true
from evaluation.intervals import Estimate
from evaluation.seeds import Estimates, paired_difference
from files import read_jsonl
from reporting.experiment import Experiment, Run

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
CAPTION_FAULTS = {"mismatched", "junk_text", "short_text"}  # what another caption can mend
REPEAT = re.compile(r"#\d+$")  # what formats/training_jsonl.py adds to the ids of repeated rows


@dataclass(frozen=True)
class Variant:
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


def variants(experiments: list[Experiment]) -> list[Variant]:
    """The complete recipe, then the others by what their operator is worth, most valuable first.

    Args:
        experiments: the complete recipe first; the others' configurations name one operator more in `without`.

    Raises:
        InputError: an experiment leaves out no operator; runs that cannot be paired; synthesized.jsonl is missing.
    """
    complete, *others = experiments
    measured = [
        _variant(other, _left_out(other, complete), paired_difference(complete.scores, other.scores))
        for other in others
    ]
    measured.sort(key=_worth, reverse=True)
    return [_variant(complete, "", {}), *measured]


def _variant(experiment: Experiment, without: str, worth: Estimates) -> Variant:
    runs = experiment.runs
    synthesized = [run.synthesize["rows_kept"] for run in runs if run.synthesize]
    return Variant(
        name=experiment.name,
        without=without,
        seeds=len(runs),
        rows_filtered=float(np.mean([run.filter["rows_kept"] for run in runs])),
        rows_synthesized=float(np.mean(synthesized)) if synthesized else None,
        faults=_faults(experiment),
        scores=experiment.groups,
        worth=worth,
    )


def _left_out(experiment: Experiment, complete: Experiment) -> str:
    known = complete.config.get("without", [])
    if operators := [operator for operator in experiment.config.get("without", []) if operator not in known]:
        return ", ".join(operators)
    raise InputError(
        f"{experiment.name} leaves out no operator that {complete.name} has; "
        "name one under `without` in its configuration"
    )


def _worth(variant: Variant) -> float:
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


def faults_left(run: Run, truth: dict[str, dict]) -> Counter[str]:
    """Planted faults among the rows that a run trained on, by kind; a repeated row counts once.

    A faulty caption that was replaced is mended if the new one is true (evaluation/caption_attributes.py).

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
        mended = fault in CAPTION_FAULTS and is_true(recaptions.get(identifier, ""), true_caption)
        if fault != "clean" and not mended:
            left[fault] += 1
    return left


def _rows(path: Path, rule: str) -> list[dict]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; run the rule {rule} first")
    return list(read_jsonl(path))


def tabulate(rows: list[Variant]) -> pd.DataFrame:
    """One row per variant, the complete recipe first.

    Columns: experiment, without, seeds, counts with `<count>_difference`, and for every score `<group>_<metric>` with
    `_worth`, `_worth_low` and `_worth_high`.
    """
    complete = rows[0]
    return pd.DataFrame([_record(row, complete) for row in rows])


def _record(variant: Variant, complete: Variant) -> dict:
    record: dict = {"experiment": variant.name, "without": variant.without, "seeds": variant.seeds}
    for name, own, reference in counts(variant, complete):
        record |= {name: own, f"{name}_difference": difference(own, reference) if variant.without else None}
    for group, metric in SCORES:
        name = f"{group.split('/')[0]}_{metric}"
        worth = estimate_of(variant.worth, group, metric)
        record[name] = estimate_of(variant.scores, group, metric).get("mean")
        record |= {f"{name}_worth{end}": worth.get(key) for end, key in WORTH_COLUMNS.items()}
    return record


def counts(variant: Variant, complete: Variant) -> list[tuple[str, float | None, float | None]]:
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
