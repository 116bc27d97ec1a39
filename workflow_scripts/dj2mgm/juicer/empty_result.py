"""The error when a recipe keeps no row: which operator dropped most, what it saw, and which limit keeps how much."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dj2mgm.data.images import UnreadableImages
from dj2mgm.files import read_jsonl
from dj2mgm.juicer.data_juicer import OP, Fields
from dj2mgm.juicer.dataset import column_values
from dj2mgm.juicer.operators.declarations import decision_of, unreadable_stat
from dj2mgm.juicer.restart import EmptyResult
from dj2mgm.juicer.statistics import limits_of

KEPT_SHARES = (0.1, 0.25, 0.5)  # what the suggested limits would keep, about
DIGITS = 3


class ReadTracker(dict):
    """A row's stats, which remember the names that were read."""

    def __init__(self, stats: dict):
        super().__init__(stats)
        self.read: set[str] = set()

    def __getitem__(self, key: str):
        self.read.add(key)
        return super().__getitem__(key)


def empty_result(rows_in: int, steps: list[dict], operators: list[OP], trace: Path, rows: Path) -> EmptyResult:
    """The error to raise.

    Args:
        steps: summaries of the steps that were run; the last one kept no row.
        trace: the jsonl of dropped rows so far, so of all rows.
        rows: partitions of the stage's input.
    """
    worst = max(steps, key=lambda step: step["dropped"])
    if stat := unreadable_stat(operators[worst["step"] - 1]):
        return EmptyResult(
            f"the recipe kept none of {rows_in} rows; the images of {worst['dropped']} cannot be read "
            f"({_unreadable(stat, worst['step'], trace, rows)}): correct the paths, or the folder that they are "
            "relative to"
        )
    return EmptyResult(
        f"the recipe kept none of {rows_in} rows; {worst['operator']} (step {worst['step']}) dropped most, "
        f"{worst['dropped']} of {worst['rows_in']}"
        f"{_distribution(operators[worst['step'] - 1], _stats_at(trace, worst['step']))}: "
        "widen its limits in the recipe, or fix the data it is right about"
    )


def _unreadable(stat: str, step: int, trace: Path, rows: Path) -> UnreadableImages:
    """Count the rows that a step dropped by the reason in their stat."""
    dropped = (row for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] == step)
    reasons = {row["id"]: row["stats"][stat] for row in dropped}
    found = UnreadableImages()
    for identifier, images in column_values(rows, "id", "images"):
        if identifier in reasons:
            found.add(reasons[identifier], images[0])
    return found


def _stats_at(trace: Path, step: int) -> list[dict]:
    """The stats of every row that reached a step: all were dropped there or later."""
    return [row["stats"] for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] >= step]


def _distribution(operator: OP, stats: list[dict]) -> str:
    """` (image_text_similarity: lowest …; min_score 0.1 would keep 12 %, …)` for a filter that judges by one number."""
    key = _judged_by(operator, stats)
    values = np.array(list(_numbers(stats, key)) if key else [])
    if not len(values):
        return ""
    text = f"{key}: lowest {_show(values.min())}, median {_show(np.median(values))}, highest {_show(values.max())}"
    limits = [f"{limit} would keep {share:.0%}" for limit, share in _limits(operator, key, values)]
    return f" ({'; '.join([text, ', '.join(limits)] if limits else [text])})"


def _judged_by(operator: OP, stats: list[dict]) -> str | None:
    """The stat that a filter reads to decide; None if it reads several, or the operator is no filter."""
    decide = decision_of(operator)
    for row in stats if decide else ():
        tracker = ReadTracker(row)
        list(decide({Fields.stats: [tracker]}))
        if tracker.read:
            return tracker.read.pop() if len(tracker.read) == 1 else None
    return None


def _numbers(stats: list[dict], key: str) -> Iterator[float]:
    for row in stats:
        value = row.get(key)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _limits(operator: OP, statistic: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    """Limits that keep more and more, with the share of rows that each keeps, on the side where most were dropped."""
    limits = limits_of(operator, None, statistic, alone=True).values()
    dropped = {limit: int(limit.drops(values).sum()) for limit in limits}
    if not any(dropped.values()):
        return
    judged = max(dropped, key=dropped.get)  # the lower one of two that drop equally many
    name, sign = judged.argument, 1 if judged.side == "min" else -1
    seen = set()
    for share in KEPT_SHARES:
        limit = sign * _rounded_down(np.quantile(sign * values, 1 - share))
        if limit not in seen:
            seen.add(limit)
            yield f"{name} {_show(limit)}", float(np.mean(sign * values >= sign * limit))


def _rounded_down(value: float) -> float:
    step = 10.0 ** (np.floor(np.log10(abs(value))) - DIGITS + 1) if value else 1.0
    return float(np.floor(value / step) * step)


def _show(value: float) -> str:
    return f"{value:.{DIGITS}g}"
