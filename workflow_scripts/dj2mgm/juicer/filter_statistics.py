"""Values of the limits that filters apply to their statistics.

Names of statistics and of the arguments that limit them are in recipes/statistic_limits.py.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dj2mgm.data.score_limits import UNLIMITED_FROM
from dj2mgm.juicer.patched_data_juicer import Filter
from dj2mgm.recipes.statistic_limits import find_limit_arguments


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
    if operator.reversed_range:
        return {}
    return {limit.side: limit for limit in _find_limits(operator, arguments or {}, statistic, alone)}


def _find_limits(operator: Filter, arguments: dict, statistic: str, alone: bool) -> Iterator[FilterLimit]:
    parameters = inspect.signature(type(operator).__init__).parameters
    for side, name in find_limit_arguments(parameters, statistic, alone).items():
        value = getattr(operator, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            default = parameters[name].default
            yield FilterLimit(side, name, float(value), arguments.get(name, value if default is None else default))
