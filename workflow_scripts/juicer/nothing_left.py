"""What to say when a recipe keeps no row: which operator dropped most, what it saw, and which limit keeps how much."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from errors import InputError
from files import read_jsonl
from juicer.library import OP, Fields, Filter
from juicer.statistics import limits_of

KEPT_SHARES = (0.1, 0.25, 0.5)  # what the suggested limits would keep, about
DIGITS = 3


class Watched(dict):
    """A row's stats that remember which of them were read."""

    def __init__(self, stats: dict):
        super().__init__(stats)
        self.read: set[str] = set()

    def __getitem__(self, key: str):
        self.read.add(key)
        return super().__getitem__(key)


def nothing_left(rows_in: int, steps: list[dict], operators: list[OP], trace: Path) -> InputError:
    """The error to raise.

    Args:
        steps: summaries of the steps that were run; the last one left no row.
        trace: the jsonl of dropped rows so far, so of all rows.
    """
    worst = max(steps, key=lambda step: step["dropped"])
    return InputError(
        f"the recipe kept none of {rows_in} rows; {worst['operator']} (step {worst['step']}) dropped most, "
        f"{worst['dropped']} of {worst['rows_in']}"
        f"{_distribution(operators[worst['step'] - 1], _stats_at(trace, worst['step']))}: "
        "widen its limits in the recipe, or fix the data it is right about"
    )


def _stats_at(trace: Path, step: int) -> list[dict]:
    """The stats of every row that reached a step: all were dropped there or later."""
    return [row["stats"] for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] >= step]


def _distribution(operator: OP, stats: list[dict]) -> str:
    """` (image_text_similarity: lowest …; min_score 0.1 would keep 12 %, …)` for a filter that judges by one number."""
    key = _judged_by(operator, stats) if isinstance(operator, Filter) else None
    values = np.array(list(_numbers(stats, key)) if key else [])
    if not len(values):
        return ""
    text = f"{key}: lowest {_show(values.min())}, median {_show(np.median(values))}, highest {_show(values.max())}"
    limits = [f"{limit} would keep {share:.0%}" for limit, share in _limits(operator, key, values)]
    return f" ({'; '.join([text, ', '.join(limits)] if limits else [text])})"


def _judged_by(operator: Filter, stats: list[dict]) -> str | None:
    """The stat that the filter reads to decide, if it is one."""
    for row in stats:
        watched = Watched(row)
        list(operator.process_batched({Fields.stats: [watched]}))
        if watched.read:
            return watched.read.pop() if len(watched.read) == 1 else None
    return None


def _numbers(stats: list[dict], key: str) -> Iterator[float]:
    for row in stats:
        value = row.get(key)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _limits(operator: Filter, statistic: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
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
