"""Shares of the rows in place of limits: `keep_fraction` and quantiles are checked and turned into limits."""

from collections.abc import Iterable

from data_juicer.ops.base_op import OP, Filter
from data_juicer.utils.constant import Fields

from dj2mgm.data.shares import SIDES, compute_score_limits

from .declarations import limits_of, shares


class FractionFilter(Filter):
    """A filter that takes shares of the rows in place of its limits, in a plain Data-Juicer run too."""

    needs_all_rows = False
    keep_fraction: float | None

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """Run like `Filter.run`; if there is a share, set the limits between scoring and dropping."""
        if not shares(self):
            return super().run(dataset, exporter=exporter, tracer=tracer, reduce=reduce)
        scored = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        set_limits(self, scored[Fields.stats])
        return super().run(scored, exporter=exporter, tracer=tracer) if reduce else scored


def check_fraction(keep_fraction: float | None) -> None:
    """Raise ValueError unless `keep_fraction` is None or in (0, 1]."""
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be above 0 and at most 1, found {keep_fraction}")


def check_sides(**limits: tuple[float | None, float | None]) -> None:
    """Raise ValueError if one side has two limits.

    Args:
        limits: for each name of a share, its value and the value of the limit that it replaces.
    """
    for name, (share, limit) in limits.items():
        if share is not None and limit is not None:
            raise ValueError(f"{name} {share} replaces a limit, but a limit of {limit} is given too; give one of them")


def check_quantiles(lower: float | None, upper: float | None) -> None:
    """Raise ValueError unless 0 ≤ `lower` < `upper` ≤ 1; None means no limit on that side."""
    if not 0 <= (0 if lower is None else lower) < (1 if upper is None else upper) <= 1:
        raise ValueError(f"lower_quantile must be below upper_quantile, both from 0 to 1; found {lower} and {upper}")


def set_limits(operator: OP, stats: Iterable[dict]) -> dict[str, float | None]:
    """Set the operator's limits so that it keeps its share of the rows; return the equivalent arguments.

    Args:
        operator: an operator that declares `limit`, and optionally `quantiles` (see `declarations`).
        stats: stats of all rows, as the operator has measured them.
    """
    given = shares(operator)
    scores = (score for row in stats for score in operator.scores_of(row))
    found = compute_score_limits(scores, **{name: getattr(operator, name) for name in given})
    for name, limit in given.items():
        setattr(operator, limit, found[SIDES[name]])
    # limits that no share replaces are included: without a share they would have other defaults
    return dict.fromkeys(given) | {limit: getattr(operator, limit) for limit in limits_of(operator)}
