"""Where `keep_fraction` cuts: the score that separates the best share of the rows from the others."""

from collections.abc import Iterable

import numpy as np
from data_juicer.ops.base_op import OP, Filter
from data_juicer.utils.constant import Fields

TIE = 1e-6  # scores of equal rows in different batches differ by less


class FractionFilter(Filter):
    """A filter that declares `limit`; in a plain Data-Juicer run, too, it takes `keep_fraction` in its place."""

    needs_all_rows = False
    keep_fraction: float | None

    def run(self, dataset, *, exporter=None, tracer=None, reduce: bool = True):
        """As `Filter.run`, with the limit set between scoring and dropping where `keep_fraction` asks for it."""
        if self.keep_fraction is None:
            return super().run(dataset, exporter=exporter, tracer=tracer, reduce=reduce)
        scored = super().run(dataset, exporter=exporter, tracer=tracer, reduce=False)
        set_limit(self, scored[Fields.stats])
        return super().run(scored, exporter=exporter, tracer=tracer) if reduce else scored


def check_fraction(keep_fraction: float | None) -> None:
    """Raise ValueError for what is no share; None stands for none."""
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be above 0 and at most 1, found {keep_fraction}")


def set_limit(operator: OP, stats: Iterable[dict]) -> None:
    """Set the operator's limit so that it keeps its fraction of the rows.

    Args:
        operator: declares `limit`, as described in `declarations`.
        stats: of all rows, which the operator has measured.
    """
    scores = (score for row in stats for score in operator.scores_of(row))
    setattr(operator, operator.limit, limit_of_fraction(scores, operator.keep_fraction))


def limit_of_fraction(scores: Iterable[float], keep_fraction: float) -> float:
    """The lowest score among the `keep_fraction` highest ones; at least one is kept."""
    values = np.fromiter(scores, dtype=np.float64)  # eight bytes for each row
    if not len(values):
        return 0.0
    kept = max(1, round(keep_fraction * len(values)))
    return float(np.partition(values, -kept)[-kept]) - TIE
