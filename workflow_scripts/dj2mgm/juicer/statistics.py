"""What a filter measures, and the range that it keeps."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dj2mgm.data.shares import SIDES, limits_of_shares
from dj2mgm.juicer.data_juicer import Filter

PREFIXES = {"min": "min_", "max": "max_"}  # of Data-Juicer's arguments for the two ends of a range
UNLIMITED = 2.0**40  # Data-Juicer's defaults for "no limit" are this or more


@dataclass(frozen=True)
class Limit:
    """One end of the range that a filter keeps; values at the limit are kept."""

    side: str  # min or max
    argument: str
    value: float
    written: str | int | float  # as in a recipe
    reason: str = ""

    def drops(self, values: np.ndarray) -> np.ndarray:
        """(N,) bool. A row without a value (NaN) is kept, as Data-Juicer keeps it."""
        return values < self.value if self.side == "min" else values > self.value

    @property
    def unlimited(self) -> bool:
        return abs(self.value) >= UNLIMITED


Limits = dict[str, Limit]  # by side


@dataclass(frozen=True)
class Statistic:
    """One of Data-Juicer's statistics over all rows."""

    name: str
    operator: str
    values: np.ndarray  # (N,) float64, NaN where a row has none
    of_images: bool  # one number per image, rather than per text
    arguments: dict | None  # the operator's in the recipe; None if it is there for the analysis only
    limits: Limits  # the operator's: the recipe's, and Data-Juicer's defaults where it states none
    suggested: Limits = field(default_factory=dict)
    remark: str = ""  # what the distribution's shape says

    @property
    def current(self) -> Limits:
        """What the recipe applies: nothing where the operator is not in it."""
        return {} if self.arguments is None else self.limits

    @property
    def finite(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]

    def drops(self, limits: Limits) -> np.ndarray:
        """(N,) bool."""
        dropped = np.zeros(len(self.values), dtype=bool)
        for limit in limits.values():
            dropped |= limit.drops(self.values)
        return dropped


def as_numbers(column: list) -> tuple[np.ndarray, bool] | None:
    """A statistic's column as (N,) float64, and whether it holds one number per image; None if it is not numeric."""
    per_image = any(isinstance(value, list) for value in column)
    single = [(value[0] if len(value) == 1 else None) if isinstance(value, list) else value for value in column]
    if any(isinstance(value, str | bool | list | dict) for value in single):
        return None
    values = np.array([np.nan if value is None else value for value in single], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return None if np.isnan(values).all() else (values, per_image)


def limits_of(operator: Filter, arguments: dict | None, statistic: str, alone: bool) -> Limits:
    """The range that an operator keeps of a statistic, from its arguments min_… and max_….

    Args:
        arguments: as the recipe states them; the operator knows the defaults.
        alone: whether it is the operator's only statistic; of several, an argument's name is in its statistic's
            (min_width, image_width).

    Returns:
        Nothing for an operator that has no such arguments or keeps what is outside of its range.
    """
    if operator.reversed_range:
        return {}
    return {limit.side: limit for limit in _read_limits(operator, arguments or {}, statistic, alone)}


def shares_kept(values: np.ndarray, arguments: dict) -> Limits:
    """The limits of an operator that keeps a share of the rows, whatever other limits it states."""
    given = {name: arguments[name] for name in SIDES if arguments.get(name) is not None}
    found = limits_of_shares(values[np.isfinite(values)], **given)
    return {SIDES[name]: Limit(SIDES[name], name, found[SIDES[name]], share) for name, share in given.items()}


def _read_limits(operator: Filter, arguments: dict, statistic: str, alone: bool) -> Iterator[Limit]:
    parameters = inspect.signature(type(operator).__init__).parameters
    ranges = {name[len(prefix) :] for name in parameters for prefix in PREFIXES.values() if name.startswith(prefix)}
    words = ranges if alone and len(ranges) == 1 else {word for word in ranges if word in statistic}
    if len(words) != 1:
        return
    [word] = words
    for side, prefix in PREFIXES.items():
        name = prefix + word
        value = getattr(operator, name, None)
        if name in parameters and isinstance(value, int | float) and not isinstance(value, bool):
            default = parameters[name].default
            yield Limit(side, name, float(value), arguments.get(name, value if default is None else default))
