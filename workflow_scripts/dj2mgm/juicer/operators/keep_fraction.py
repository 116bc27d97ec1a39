"""Operators that keep a share of the rows: `keep_fraction` and quantiles, checked and turned into limits."""

from collections.abc import Iterable

from data_juicer.ops.base_op import OP, Filter
from data_juicer.utils.constant import Fields

from dj2mgm.data.shares import SIDES, limits_of_shares

from .declarations import limits_of, shares


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
