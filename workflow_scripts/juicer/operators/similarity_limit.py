"""The similarity that separates the most similar share of rows from the others."""

from collections.abc import Iterable

import numpy as np

ORIGINAL = "original_image_text_similarity"  # stat: that of the caption a row came with
TIE = 1e-6  # equal rows of different batches differ by less


def check_fraction(keep_fraction: float) -> None:
    if not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction must be above 0 and at most 1, found {keep_fraction}")


def limit_of_fraction(scores: Iterable[float], keep_fraction: float) -> float:
    """The similarity of the least similar row among the `keep_fraction` most similar ones; at least one is kept."""
    values = np.fromiter(scores, dtype=np.float64)  # eight bytes for each row
    if not len(values):
        return 0.0
    kept = max(1, round(keep_fraction * len(values)))
    return float(np.partition(values, -kept)[-kept]) - TIE
