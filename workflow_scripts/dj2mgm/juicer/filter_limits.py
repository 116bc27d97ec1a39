"""Limits that filters apply to their statistics, and the error for a recipe that keeps no row, which suggests limits.

Names of statistics and of the arguments that limit them are in recipes/catalogue.py.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.data.images import UnreadableImages
from dj2mgm.data.score_limits import UNLIMITED_FROM
from dj2mgm.errors import InputError
from dj2mgm.juicer.engine import Engine
from dj2mgm.juicer.operators.declarations import get_declarations
from dj2mgm.juicer.partitions import iterate_column_values
from dj2mgm.juicer.patched_data_juicer import OP, Filter
from dj2mgm.recipes.catalogue import find_limit_arguments, read_statistic_operators
from dj2mgm.storage.files import read_jsonl

KEPT_SHARES = (0.1, 0.25, 0.5)  # approximate shares that the suggested limits would keep
SIGNIFICANT_DIGITS = 3


@dataclass(frozen=True)
class FilterLimit:
    """One end of the range that a filter keeps; values equal to the limit are kept."""

    side: str  # min or max
    argument: str
    value: float
    written: str | int | float  # spelling in a recipe

    def drops(self, values: np.ndarray) -> np.ndarray:
        """Return the dropped rows, (N,) bool; rows without a value (NaN) are kept, as in Data-Juicer."""
        return values < self.value if self.side == "min" else values > self.value

    @property
    def unlimited(self) -> bool:
        return abs(self.value) >= UNLIMITED_FROM


Limits = dict[str, FilterLimit]  # by side


def read_statistic_limits(operator: Filter, arguments: dict | None, statistic: str, alone: bool) -> Limits:
    """Return the range that an operator keeps of a statistic by side, from its arguments min_… and max_….

    It is empty if the operator has no such arguments or keeps values outside of its range. Arguments that the recipe
    does not state have the operator's defaults. `alone` means that the operator has no other statistic.
    """
    limits: Limits = {}
    parameters = inspect.signature(type(operator).__init__).parameters
    for side, name in find_limit_arguments(parameters, statistic, alone).items():
        value = getattr(operator, name, None)
        if _is_number(value) and not operator.reversed_range:
            default = parameters[name].default
            written = (arguments or {}).get(name, value if default is None else default)
            limits[side] = FilterLimit(side, name, float(value), written)
    return limits


class NoRowsKeptError(InputError):
    """The error for a recipe that has run to its end without a row to write."""


def make_no_rows_error(engine: Engine, trace: Path) -> NoRowsKeptError:
    """Return the error to raise if the last finished operator kept no row.

    It names the operator that dropped the most rows, the range of its statistic, and limits that would keep some rows.
    `trace` lists the dropped rows, which here are all input rows.
    """
    rows_in, worst = engine.rows_in, max(engine.summaries, key=lambda summary: summary.dropped)
    operator = engine.operators[worst.step - 1]
    dropped = [row for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] >= worst.step]
    if stat := get_declarations(operator).unreadable_stat:
        reasons = {row["id"]: row["stats"][stat] for row in dropped if row["step"] == worst.step}
        unreadable = UnreadableImages()
        for identifier, images in iterate_column_values(engine.folders[0], "id", "images"):
            if identifier in reasons:
                unreadable.add(reasons[identifier], images[0])
        return NoRowsKeptError(
            f"the recipe kept none of {rows_in} rows; the images of {worst.dropped} of them cannot be read "
            f"({unreadable}). Correct the paths, or the folder that they are relative to"
        )
    return NoRowsKeptError(
        f"the recipe kept none of {rows_in} rows; {worst.operator} (step {worst.step}) dropped the most rows "
        f"({worst.dropped} of {worst.rows_in})"
        f"{_describe_distribution(operator, [row['stats'] for row in dropped])}. "  # of every row that reached the step
        "Widen its limits in the recipe, or correct the data"
    )


def _describe_distribution(operator: OP, stats: list[dict]) -> str:
    """Return ` (image_text_similarity: lowest …; min_score 0.1 would keep 12 %, …)` for a filter with one statistic."""
    name = operator._name.removeprefix("batched_")
    keys = [key for key, (filter_name, _) in read_statistic_operators().items() if filter_name == name]
    values = np.array(list(_extract_numbers(stats, keys[0])) if len(keys) == 1 else [])
    if not len(values):
        return ""
    [key] = keys
    text = (
        f"{key}: lowest {_format(values.min())}, median {_format(np.median(values))}, highest {_format(values.max())}"
    )
    limits = [f"{limit} would keep {share:.0%}" for limit, share in _suggest_limits(operator, key, values)]
    return f" ({'; '.join([text, ', '.join(limits)] if limits else [text])})"


def _extract_numbers(stats: list[dict], key: str) -> Iterator[float]:
    for row in stats:
        value = row.get(key)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if _is_number(value):
            yield value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _suggest_limits(operator: OP, statistic: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield limits with the share of rows that each keeps, smallest share first.

    All are on the side that dropped most rows.
    """
    limits = read_statistic_limits(operator, None, statistic, alone=True).values()
    dropped = {limit: int(limit.drops(values).sum()) for limit in limits}
    if not any(dropped.values()):
        return
    strictest = max(dropped, key=dropped.get)  # on a tie, the lower limit
    sign = 1 if strictest.side == "min" else -1
    suggested = set()
    for share in KEPT_SHARES:
        limit = sign * _round_down(np.quantile(sign * values, 1 - share))
        if limit not in suggested:
            suggested.add(limit)
            yield f"{strictest.argument} {_format(limit)}", float(np.mean(sign * values >= sign * limit))


def _round_down(value: float) -> float:
    step = 10.0 ** (np.floor(np.log10(abs(value))) - SIGNIFICANT_DIGITS + 1) if value else 1.0
    return float(np.floor(value / step) * step)


def _format(value: float) -> str:
    return f"{value:.{SIGNIFICANT_DIGITS}g}"
