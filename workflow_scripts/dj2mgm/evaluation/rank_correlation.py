"""Spearman's rank correlation with its 95 % interval.

The interval is symmetric in Fisher's z = artanh ρ, whose standard error is √((1 + ρ² / 2) / (n − 3)) (Bonett and Wright
2000, Psychometrika 65, 23). It treats the pairs of values as independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, spearmanr

from dj2mgm.evaluation.intervals import LEVEL

MIN_PAIRS = 10  # pairs of values; the standard error is that of large samples


@dataclass(frozen=True)
class RankCorrelation:
    """A rank correlation of `count` pairs of values, from `low` to `high` at 95 % confidence."""

    value: float
    low: float
    high: float
    count: int


def correlate_ranks(first: Sequence[float], second: Sequence[float]) -> RankCorrelation | None:
    """Return the correlation of paired values; None for fewer than `MIN_PAIRS` pairs or if one side is constant."""
    if len(first) < MIN_PAIRS or min(np.ptp(first), np.ptp(second)) == 0:
        return None
    value = float(spearmanr(first, second).statistic)
    with np.errstate(divide="ignore"):  # artanh 1 is infinite, and the interval has no length
        z = np.arctanh(value)
    half = norm.isf(LEVEL / 2) * np.sqrt((1 + value**2 / 2) / (len(first) - 3))
    return RankCorrelation(value, float(np.tanh(z - half)), float(np.tanh(z + half)), len(first))
