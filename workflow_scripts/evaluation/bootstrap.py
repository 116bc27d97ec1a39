"""Percentile bootstrap of a mean, resampling the independent units.

Five questions about one image rise and fall together, so the image is what is resampled, with all its values: the
interval would otherwise be too narrow (cluster bootstrap; Efron and Tibshirani 1993, ch. 8 and 13).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS_AT_ONCE = 2_000_000  # indices held in memory at a time, 16 MB


@dataclass(frozen=True)
class Measurements:
    """Values of one metric and, for each, the unit (image id) that it belongs to."""

    values: np.ndarray  # (N,) float64
    units: np.ndarray  # (N,) str

    @classmethod
    def of(cls, values: Sequence[float], units: Sequence[str]) -> "Measurements":
        measured = cls(np.asarray(values, dtype=np.float64), np.asarray(units, dtype=str))
        if measured.values.shape != measured.units.shape:
            raise ValueError(f"{len(measured.values)} values for {len(measured.units)} units")
        return measured

    def __sub__(self, other: "Measurements") -> "Measurements":
        """Paired difference; both sides must measure the same units in the same order."""
        if not np.array_equal(self.units, other.units):
            raise ValueError("paired measurements must have the same units in the same order")
        return Measurements(self.values - other.values, self.units)


def bootstrap_mean(measured: Measurements, samples: int, seed: int, confidence: float = 0.95) -> dict[str, float]:
    """Mean of all values with its percentile interval over `samples` resamplings of the units.

    Returns:
        {"n": number of values, "mean": …, "low": …, "high": …}

    Raises:
        ValueError: there is nothing to average.
    """
    if not len(measured.values):
        raise ValueError("the mean of no values is not defined")
    units, unit_of_value = np.unique(measured.units, return_inverse=True)
    sums = np.bincount(unit_of_value, weights=measured.values)  # (U,)
    sizes = np.bincount(unit_of_value)  # (U,)
    means = bootstrap_means(sums[None], sizes[None], samples, seed)[:, 0]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return {
        "n": len(measured.values),
        "mean": float(measured.values.mean()),
        "low": float(low),
        "high": float(high),
    }


def bootstrap_means(sums: np.ndarray, counts: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Resampled means of M metrics of the same U units, all from the same draws.

    Args:
        sums: (M, U) sum of each unit's values.
        counts: (M, U) number of each unit's values.

    Returns:
        (samples, M) float64
    """
    units = sums.shape[1]
    rng = np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // units)
    means = []
    for start in range(0, samples, at_once):
        rows = min(at_once, samples - start)
        drawn = rng.integers(units, size=(rows, units)) + units * np.arange(rows)[:, None]
        times_drawn = np.bincount(drawn.ravel(), minlength=rows * units).reshape(rows, units).astype(np.float64)
        means.append((times_drawn @ sums.T) / (times_drawn @ counts.T))
    return np.concatenate(means)
