"""Means over images and seeds, with 95 % intervals.

A measured mean is uncertain for two reasons: other images could be easier or harder, and training with another seed
gives another model. More images reduce only the first uncertainty, more seeds mainly the second. Half the length of the
interval is

    half_width² = t²(images) · V_images + t²(S − 1) · s² / S

V_images is the jackknife variance of the mean over S seeds. It leaves out one image with all its values at a time,
because the answers to five questions about one image are correlated (Tukey 1958). It errs on the wide side if images
have different numbers of values (Efron and Stein 1981), and equals the variance of the images divided by their number U
if the numbers are equal. Its t has U − 1 degrees of freedom or, for images with different numbers n of values, fewer:
(Σn)² / Σn² − 1 (Kish 1965). s² is the variance between the means of the seeds. With one seed the training noise is
unknown, and the interval covers images only.

Each variance has the Student's t of its own degrees of freedom (Banerjee 1960, Sankhyā 22, 357). For normal scores the
interval contains the true mean in at least 95 of 100 cases for any ratio of the variances: P(z² ≤ x) is concave in x,
so the coverage of the weighted sum is at least that of its parts. Welch–Satterthwaite degrees of freedom are narrower,
but contain it in only 88 of 100 cases if two seeds differ strongly. If seeds disagree about single images, that noise
enters both variances, which errs on the wide side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.05  # 1 − the confidence of intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over images and seeds with its interval; `low` and `high` are None for a single image."""

    n: int  # values per seed
    images: int
    seeds: int
    mean: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval; both are the mean if there is no interval."""
        return (self.mean, self.mean) if self.low is None else (self.low, self.high)

    @property
    def is_above_zero(self) -> bool:
        """True if the whole interval is above zero."""
        return self.low is not None and self.low > 0

    @property
    def is_below_zero(self) -> bool:
        """True if the whole interval is below zero."""
        return self.high is not None and self.high < 0

    def clip_interval(self, low: float, high: float) -> "Estimate":
        """Return the estimate with the part of its interval that lies in the range of possible values."""
        return self if self.low is None else replace(self, low=max(self.low, low), high=min(self.high, high))


@dataclass(frozen=True)
class Measurements:
    """Values of one metric, each with its unit (image id)."""

    values: np.ndarray  # (N,) float64
    units: np.ndarray  # (N,) str

    @classmethod
    def from_values(cls, values: Sequence[float], units: Sequence[str]) -> "Measurements":
        measurements = cls(np.asarray(values, dtype=np.float64), np.asarray(units, dtype=str))
        if measurements.values.shape != measurements.units.shape:
            raise ValueError(f"{len(measurements.values)} values for {len(measurements.units)} units")
        return measurements

    def __sub__(self, other: "Measurements") -> "Measurements":
        """Return the paired difference; both sides must have the same units in the same order."""
        if not np.array_equal(self.units, other.units):
            raise ValueError("paired measurements must have the same units in the same order")
        return Measurements(self.values - other.values, self.units)

    def sum_by_unit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sorted units (U,), and the sum (U,) and number (U,) of each unit's values."""
        units, unit_of_value = np.unique(self.units, return_inverse=True)
        return units, np.bincount(unit_of_value, weights=self.values), np.bincount(unit_of_value)


def estimate(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """Return the mean over S seeds with its interval.

    Args:
        sums: (S, U) sum of each image's values.
        counts: (U,) number of each image's values, equal for all seeds. Their sum must not be 0.
    """
    if not counts.sum():
        raise ValueError("the mean of no values is not defined")
    mean, half_width = compute_mean_and_half_width(sums, counts)
    ends = (None, None) if half_width is None else (float(mean - half_width), float(mean + half_width))
    seeds, images = sums.shape
    return Estimate(int(counts.sum()), images, seeds, float(mean), *ends)


def compute_mean_and_half_width(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the mean and half the length of its interval (see the top of the file), None for a single image.

    Args:
        sums: (…, S, U), for any number of studies at once.
        counts: (U,)

    Returns:
        (…) and (…)
    """
    seeds = sums.shape[-2]
    means = sums.sum(axis=-1) / counts.sum()  # (…, S)
    mean = means.mean(axis=-1)
    if sums.shape[-1] == 1:
        return mean, None
    variance, degrees_of_freedom = compute_image_variance(sums, counts)
    square = compute_student_quantile(degrees_of_freedom) ** 2 * variance
    if seeds > 1:
        square = square + compute_student_quantile(seeds - 1) ** 2 * means.var(axis=-1, ddof=1) / seeds
    return mean, np.sqrt(square)


def compute_image_variance(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the jackknife variance over images of the mean over seeds (…), and its degrees of freedom.

    The variance is NaN for a single image.

    Args:
        sums: (…, S, U)
        counts: (U,)
    """
    images, total = sums.shape[-1], counts.sum()
    if images == 1:
        return np.full(sums.shape[:-2], np.nan), 1.0
    seed_means = sums.mean(axis=-2)  # (…, U)
    mean = seed_means.sum(axis=-1, keepdims=True) / total
    changes = (seed_means - mean * counts) / (total - counts)  # of the mean if an image is left out, (…, U)
    degrees_of_freedom = max(1.0, total**2 / (counts**2).sum() - 1)
    return (images - 1) / images * (changes**2).sum(axis=-1), degrees_of_freedom


def compute_student_quantile(
    degrees_of_freedom: float | np.ndarray, level: float | np.ndarray = LEVEL
) -> float | np.ndarray:
    """Return the value that |t| exceeds with probability `level`."""
    return -stdtrit(degrees_of_freedom, level / 2)
