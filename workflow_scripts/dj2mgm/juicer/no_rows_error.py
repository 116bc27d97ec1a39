"""The error for a recipe that keeps no row.

It names the operator that dropped the most rows, the range of its statistic, and limits that would keep some rows.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dj2mgm.data.images import UnreadableImages
from dj2mgm.errors import InputError
from dj2mgm.juicer.filter_statistics import read_statistic_limits
from dj2mgm.juicer.operators.declarations import get_decision_method, get_declarations
from dj2mgm.juicer.partitions import iterate_column_values
from dj2mgm.juicer.patched_data_juicer import OP, Fields
from dj2mgm.records.stage_records import OperatorSummary
from dj2mgm.storage.files import read_jsonl


class NoRowsKeptError(InputError):
    """The error for a recipe that has run to its end without a row to write."""


KEPT_SHARES = (0.1, 0.25, 0.5)  # approximate shares that the suggested limits would keep
SIGNIFICANT_DIGITS = 3


class ReadTracker(dict):
    """Stats of one row, which remember the keys that were read."""

    def __init__(self, stats: dict):
        super().__init__(stats)
        self.read: set[str] = set()

    def __getitem__(self, key: str):
        self.read.add(key)
        return super().__getitem__(key)


def make_no_rows_error(
    rows_in: int, summaries: list[OperatorSummary], operators: list[OP], trace: Path, rows: Path
) -> NoRowsKeptError:
    """Return the error to raise if the last finished operator kept no row.

    `trace` lists the dropped rows, which here are all input rows. `rows` is the folder of the input's partitions.
    """
    worst = max(summaries, key=lambda summary: summary.dropped)
    if stat := get_declarations(operators[worst.step - 1]).unreadable_stat:
        return NoRowsKeptError(
            f"the recipe kept none of {rows_in} rows; the images of {worst.dropped} of them cannot be read "
            f"({_count_unreadable(stat, worst.step, trace, rows)}). Correct the paths, or the folder that they are "
            "relative to"
        )
    return NoRowsKeptError(
        f"the recipe kept none of {rows_in} rows; {worst.operator} (step {worst.step}) dropped the most rows "
        f"({worst.dropped} of {worst.rows_in})"
        f"{_describe_distribution(operators[worst.step - 1], _read_stats_at(trace, worst.step))}. "
        "Widen its limits in the recipe, or correct the data"
    )


def _count_unreadable(stat: str, step: int, trace: Path, rows: Path) -> UnreadableImages:
    """Count the rows that a step dropped, grouped by the reason in their stat."""
    dropped = (row for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] == step)
    reasons = {row["id"]: row["stats"][stat] for row in dropped}
    unreadable = UnreadableImages()
    for identifier, images in iterate_column_values(rows, "id", "images"):
        if identifier in reasons:
            unreadable.add(reasons[identifier], images[0])
    return unreadable


def _read_stats_at(trace: Path, step: int) -> list[dict]:
    """Return the stats of every row that reached a step; all were dropped there or later."""
    return [row["stats"] for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] >= step]


def _describe_distribution(operator: OP, stats: list[dict]) -> str:
    """Return ` (image_text_similarity: lowest …; min_score 0.1 would keep 12 %, …)` for a filter with one statistic."""
    key = _find_decisive_stat(operator, stats)
    values = np.array(list(_extract_numbers(stats, key)) if key else [])
    if not len(values):
        return ""
    text = (
        f"{key}: lowest {_format(values.min())}, median {_format(np.median(values))}, highest {_format(values.max())}"
    )
    limits = [f"{limit} would keep {share:.0%}" for limit, share in _suggest_limits(operator, key, values)]
    return f" ({'; '.join([text, ', '.join(limits)] if limits else [text])})"


def _find_decisive_stat(operator: OP, stats: list[dict]) -> str | None:
    """Return the stat by which a filter decides; None if there are several, or if the operator is not a filter."""
    decide = get_decision_method(operator)
    for row in stats if decide else ():
        tracker = ReadTracker(row)
        list(decide({Fields.stats: [tracker]}))
        if tracker.read:
            return tracker.read.pop() if len(tracker.read) == 1 else None
    return None


def _extract_numbers(stats: list[dict], key: str) -> Iterator[float]:
    for row in stats:
        value = row.get(key)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _suggest_limits(operator: OP, statistic: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield limits with the share of rows that each keeps, smallest share first.

    All are on the side that dropped most rows.
    """
    limits = read_statistic_limits(operator, None, statistic, alone=True).values()
    dropped = {limit: int(limit.drops(values).sum()) for limit in limits}
    if not any(dropped.values()):
        return
    strictest = max(dropped, key=dropped.get)  # on a tie, the lower limit
    name, sign = strictest.argument, 1 if strictest.side == "min" else -1
    suggested = set()
    for share in KEPT_SHARES:
        limit = sign * _round_down(np.quantile(sign * values, 1 - share))
        if limit not in suggested:
            suggested.add(limit)
            yield f"{name} {_format(limit)}", float(np.mean(sign * values >= sign * limit))


def _round_down(value: float) -> float:
    step = 10.0 ** (np.floor(np.log10(abs(value))) - SIGNIFICANT_DIGITS + 1) if value else 1.0
    return float(np.floor(value / step) * step)


def _format(value: float) -> str:
    return f"{value:.{SIGNIFICANT_DIGITS}g}"
