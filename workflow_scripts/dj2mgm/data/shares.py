"""Where `keep_fraction` and quantiles cut: scores that separate a share of the rows from the others."""

from collections.abc import Iterable

import numpy as np

TIE = 1e-6  # scores of equal rows in different batches differ by less
SIDES = {"keep_fraction": "min", "lower_quantile": "min", "upper_quantile": "max"}  # of the range that each cuts


def compute_score_limits(
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
