"""Shares of the rows in place of limits: `keep_fraction` and quantiles are checked and turned into limits."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from data_juicer.ops.base_op import Filter
from data_juicer.utils.constant import Fields

from dj2mgm.data.shares import SIDES, compute_score_limits

from .declarations import Declarations


class SharedLimits(Declarations, interface=True):
    """An operator whose limits may be given as shares of all rows' scores.

    Attributes:
        limit: name of the argument that `keep_fraction` replaces.
        quantiles: for each argument that is a quantile of the scores, the limit that it replaces. The operator has
            attributes of these names (None if the recipe gives no quantile).
        keep_fraction: share of the rows, or None.
    """

    limit: str
    quantiles: Mapping[str, str] = {}
    keep_fraction: float | None

    @staticmethod
    @abstractmethod
    def read_scores(stats: dict) -> list[float]:
        """Return the row's scores, of which `keep_fraction` is a share."""

    @property
    def shares(self) -> dict[str, str]:
        """Shares and quantiles that the recipe gives, with the limits that they replace."""
        known = {"keep_fraction": self.limit, **self.quantiles}
        return {name: limit for name, limit in known.items() if getattr(self, name) is not None}

    def set_limits(self, stats: Iterable[dict]) -> None:
        """Set the limits so that the operator keeps its share of the rows, by the measured stats of all rows."""
        shares = self.shares
        scores = (score for row in stats for score in self.read_scores(row))
        found = compute_score_limits(scores, **{name: getattr(self, name) for name in shares})
        for name, limit in shares.items():
            setattr(self, limit, found[SIDES[name]])


class ShareFilter(SharedLimits, Filter, interface=True):
    """A filter that takes shares of the rows in place of its limits, in a plain Data-Juicer run too."""

    needs_all_rows = False

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """Run like `Filter.run`; if there is a share, set the limits between scoring and dropping."""
        if not self.shares:
            return super().run(dataset, exporter=exporter, tracer=tracer, reduce=reduce)
        scored = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        self.set_limits(scored[Fields.stats])
        return super().run(scored, exporter=exporter, tracer=tracer) if reduce else scored


class ShareMapper(SharedLimits, interface=True):
    """A mapper that edits rows beyond a limit, which may be a share of the rows."""

    needs_all_rows = False

    @abstractmethod
    def measure(self, samples: dict) -> dict:
        """Return the samples with their scores as stats, and edit nothing."""


def check_fraction(keep_fraction: float | None) -> None:
    """Raise ValueError unless `keep_fraction` is None or in (0, 1]."""
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be above 0 and at most 1, found {keep_fraction}")


def check_sides(**limits: tuple[float | None, float | None]) -> None:
    """Raise ValueError if one side has two limits: a share, and a value of the limit that the share replaces."""
    for name, (share, limit) in limits.items():
        if share is not None and limit is not None:
            raise ValueError(f"{name} {share} replaces a limit, but a limit of {limit} is given too; give one of them")


def check_quantiles(lower: float | None, upper: float | None) -> None:
    """Raise ValueError unless 0 ≤ `lower` < `upper` ≤ 1; None means no limit on that side."""
    if not 0 <= (0 if lower is None else lower) < (1 if upper is None else upper) <= 1:
        raise ValueError(f"lower_quantile must be below upper_quantile, both from 0 to 1; found {lower} and {upper}")
