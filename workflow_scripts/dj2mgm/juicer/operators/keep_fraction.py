"""Where `keep_fraction` and quantiles cut: scores that separate a share of the rows from the others."""

from collections.abc import Iterable

import numpy as np
from data_juicer.ops.base_op import OP, Filter
from data_juicer.utils.constant import Fields

from .declarations import limits_of, shares

TIE = 1e-6  # scores of equal rows in different batches differ by less
SIDES = {"keep_fraction": "min", "lower_quantile": "min", "upper_quantile": "max"}  # of the range that each cuts


class FractionFilter(Filter):
    """A filter that declares `limit`; in a plain Data-Juicer run, too, it takes shares in place of its limits."""

    needs_all_rows = False
    keep_fraction: float | None

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """As `Filter.run`, with the limits set between scoring and dropping where a share asks for it."""
        if not shares(self):
            return super().run(dataset, exporter=exporter, tracer=tracer, reduce=reduce)
        scored = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        set_limits(self, scored[Fields.stats])
        return super().run(scored, exporter=exporter, tracer=tracer) if reduce else scored


def check_fraction(keep_fraction: float | None) -> None:
    """Raise ValueError for what is no share; None stands for none."""
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be above 0 and at most 1, found {keep_fraction}")


def check_sides(**limits: tuple[float | None, float | None]) -> None:
    """Raise ValueError where one side has two limits.

    Args:
        limits: by name of a share, its value and that of the limit in its place.
    """
    for name, (share, limit) in limits.items():
        if share is not None and limit is not None:
            raise ValueError(f"{name} {share} stands for a limit, and a limit of {limit} is given as well: name one")


def check_quantiles(lower: float | None, upper: float | None) -> None:
    """Raise ValueError for what is no range of quantiles; None stands for no limit on that side."""
    if not 0 <= (0 if lower is None else lower) < (1 if upper is None else upper) <= 1:
        raise ValueError(f"lower_quantile must be below upper_quantile, both from 0 to 1; found {lower} and {upper}")


def set_limits(operator: OP, stats: Iterable[dict]) -> dict[str, float | None]:
    """Set the operator's limits so that it keeps its share of the rows; return the arguments that say the same.

    Args:
        operator: declares `limit`, and perhaps `quantiles`, as described in `declarations`.
        stats: of all rows, which the operator has measured.
    """
    given = shares(operator)
    scores = (score for row in stats for score in operator.scores_of(row))
    found = limits_of_shares(scores, **{name: getattr(operator, name) for name in given})
    for name, limit in given.items():
        setattr(operator, limit, found[SIDES[name]])
    # those that no share stands for as well: without a share, they would have other defaults
    return dict.fromkeys(given) | {limit: getattr(operator, limit) for limit in limits_of(operator)}


def limits_of_shares(
    scores: Iterable[float],
    keep_fraction: float = 1.0,
    lower_quantile: float | None = None,
    upper_quantile: float = 1.0,
) -> dict[str, float]:
    """The lowest and the highest score that shares keep, as `min` and `max`: of whole rows, and of one at least. What
    is no number counts as the lowest of all, and is never kept.

    Args:
        keep_fraction: of the rows, highest scores first.
        lower_quantile: instead of it: share of the rows, lowest scores first, that is not kept.
        upper_quantile: share of the rows above which none is kept.
    """
    values = np.fromiter(scores, dtype=np.float64)  # eight bytes for each row
    rows = len(values)
    if not rows:
        return {"min": 0.0, "max": 0.0}
    values[np.isnan(values)] = -np.inf
    below = rows - round(keep_fraction * rows) if lower_quantile is None else round(lower_quantile * rows)
    first = min(below, rows - 1)
    last = max(first, round(upper_quantile * rows) - 1)
    values.partition([first, last])
    numbers = values[np.isfinite(values)]
    if not len(numbers):
        return {"min": 0.0, "max": 0.0}
    lowest, highest = np.clip(values[[first, last]], numbers.min(), numbers.max()).tolist()
    return {"min": lowest - TIE, "max": highest + TIE}
