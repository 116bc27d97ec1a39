"""Values of filters' statistics over all rows, and values of the limits that filters apply to them.

Names of statistics and of the arguments that limit them are in recipes/statistic_limits.py.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dj2mgm.data.score_limits import SIDE_BY_SHARE, UNLIMITED_FROM, compute_score_limits
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


@dataclass(frozen=True)
class Statistic:
    """The values of a Data-Juicer statistic over all rows."""

    name: str
    operator: str
    values: np.ndarray  # (N,) float64, NaN where a row has none
    of_images: bool  # one number per image, rather than per text
    in_recipe: bool  # False if only the analysis has added the operator
    limits: Limits  # limits that the recipe applies; none if the operator is not in it

    @property
    def finite(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]

    @property
    def dropped(self) -> np.ndarray:
        """The rows that the limits drop, (N,) bool."""
        dropped = np.zeros(len(self.values), dtype=bool)
        for limit in self.limits.values():
            dropped |= limit.drops(self.values)
        return dropped


def convert_to_numbers(column: list) -> tuple[np.ndarray, bool] | None:
    """Return a column as (N,) float64 and whether it has one number per image, or None if it is not numeric."""
    per_image = any(isinstance(value, list) for value in column)
    single = [(value[0] if len(value) == 1 else None) if isinstance(value, list) else value for value in column]
    if any(isinstance(value, str | bool | list | dict) for value in single):
        return None
    values = np.array([np.nan if value is None else value for value in single], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return None if np.isnan(values).all() else (values, per_image)


def read_statistic_limits(operator: Filter, arguments: dict | None, statistic: str, alone: bool) -> Limits:
    """Return the range that an operator keeps of a statistic by side, from its arguments min_… and max_….

    It is empty if the operator has no such arguments or keeps values outside of its range. Arguments that the recipe
    does not state have the operator's defaults. `alone` means that the operator has no other statistic.
    """
    if operator.reversed_range:
        return {}
    return {limit.side: limit for limit in _find_limits(operator, arguments or {}, statistic, alone)}


def find_share_limits(values: np.ndarray, arguments: dict) -> Limits:
    """Return the limits that the shares and quantiles in `arguments` set for these values."""
    shares = {name: arguments[name] for name in SIDE_BY_SHARE if arguments.get(name) is not None}
    limits = compute_score_limits(values[np.isfinite(values)], **shares)
    return {
        SIDE_BY_SHARE[name]: FilterLimit(SIDE_BY_SHARE[name], name, limits[SIDE_BY_SHARE[name]], share)
        for name, share in shares.items()
    }


def _find_limits(operator: Filter, arguments: dict, statistic: str, alone: bool) -> Iterator[FilterLimit]:
    parameters = inspect.signature(type(operator).__init__).parameters
    for side, name in find_limit_arguments(parameters, statistic, alone).items():
        value = getattr(operator, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            default = parameters[name].default
            yield FilterLimit(side, name, float(value), arguments.get(name, value if default is None else default))
