"""Limits of scores for `keep_fraction` and quantiles."""

from collections.abc import Iterable

import numpy as np

UNLIMITED_FROM = 2.0**40  # Data-Juicer's defaults for "no limit" are at least this
ORIGINAL_SIMILARITY = "original_image_text_similarity"  # statistic: similarity of the caption that the row had at first
TIE_TOLERANCE = 1e-6  # larger than the difference of equal rows' scores in different batches
# end of the range that each argument limits
SIDE_BY_SHARE = {"keep_fraction": "min", "lower_quantile": "min", "upper_quantile": "max"}


def compute_score_limits(
    scores: Iterable[float],
    keep_fraction: float = 1.0,
    lower_quantile: float | None = None,
    upper_quantile: float = 1.0,
) -> dict[str, float]:
    """Return the lowest and highest score to keep as `min` and `max`; at least one row is kept.

    A score of NaN counts as the lowest and is never kept.

    Args:
        scores: scores of the rows.
        keep_fraction: share of rows to keep, highest scores first.
        lower_quantile: alternative to `keep_fraction`: share of rows with the lowest scores to drop.
        upper_quantile: share of rows with the lowest scores above which all rows are dropped.
    """
    values = np.fromiter(scores, dtype=np.float64)  # eight bytes per row
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
    return {"min": lowest - TIE_TOLERANCE, "max": highest + TIE_TOLERANCE}
