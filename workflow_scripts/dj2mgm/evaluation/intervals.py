"""Means over images and seeds, with 95 % intervals.

A measured mean is uncertain for two reasons: other images would have been easier or harder, and training again with
another seed gives another model. More images lessen only the first, more seeds mainly the second. The interval reaches
to either side of the mean by

    half² = t²(images) · V_images + t²(S − 1) · s² / S

V_images is the jackknife variance of the mean over S seeds, one image left out at a time with all its values: five
questions about one image rise and fall together (Tukey 1958). It errs on the wide side where images have unequally many
values (Efron and Stein 1981), and is their variance over U where all have equally many. Its t has U − 1 degrees of
freedom or, with unequally many values, fewer: (Σn)² / Σn² − 1 for images with n values (Kish 1965). s² is the variance
between the means of the seeds. With one seed nothing is known about training noise, and the interval is about images
alone.

Each variance has the Student's t of its own degrees of freedom (Banerjee 1960, Sankhyā 22, 357). For normal scores the
interval holds the true mean in at least 95 of 100 cases, whichever variance is the larger: P(z² ≤ x) is concave in x,
so the coverage of the weighted sum is at least that of its parts. Welch–Satterthwaite degrees of freedom are narrower,
but hold it in only 88 of 100 cases where two seeds differ by much. Where seeds disagree about single images, that noise
is in both variances, which errs on the wide side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95

Estimate = dict[str, float | None]  # n: values per seed, images, seeds: their numbers, mean, low, high


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

    def per_unit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Units (U,) in order, the sum (U,) and the number (U,) of each one's values."""
        units, unit_of_value = np.unique(self.units, return_inverse=True)
        return units, np.bincount(unit_of_value, weights=self.values), np.bincount(unit_of_value)


def estimate(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """Mean over S seeds with its interval; `low` and `high` are None where a single image leaves it unknown.

    Args:
        sums: (S, U) sum of each image's values.
        counts: (U,) number of each image's values, the same for all seeds.

    Raises:
        ValueError: there is nothing to average.
    """
    if not counts.sum():
        raise ValueError("the mean of no values is not defined")
    mean, half = mean_and_half(sums, counts)
    ends = {"low": None, "high": None} if half is None else {"low": float(mean - half), "high": float(mean + half)}
    seeds, images = sums.shape
    return {"n": int(counts.sum()), "images": images, "seeds": seeds, "mean": float(mean)} | ends


def mean_and_half(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean of all values and half the length of its interval, see the top of the file; None for a single image.

    Args:
        sums: (…, S, U), any number of studies at once.
        counts: (U,)

    Returns:
        (…) and (…)
    """
    seeds, images = sums.shape[-2:]
    total = counts.sum()
    means = sums.sum(axis=-1) / total  # (…, S)
    mean = means.mean(axis=-1)
    if images == 1:
        return mean, None
    left_out = (sums.mean(axis=-2) - mean[..., None] * counts) / (total - counts)  # the mean's change, (…, U)
    freedom = max(1.0, total**2 / (counts**2).sum() - 1)
    squared = student_quantile(freedom) ** 2 * (images - 1) / images * (left_out**2).sum(axis=-1)
    if seeds > 1:
        squared = squared + student_quantile(seeds - 1) ** 2 * means.var(axis=-1, ddof=1) / seeds
    return mean, np.sqrt(squared)


@lru_cache(maxsize=256)
def student_quantile(freedom: float) -> float:
    """The value that Student's t exceeds in absolute size with probability 0.05, for 1 or more degrees of freedom.

    From the density's integral on a grid; right to six digits.
    """
    freedom = min(freedom, 1e6)  # from there on it is the normal distribution, to six digits
    x = np.linspace(0, 13, 20_001)  # one degree of freedom has the largest quantile, 12.7
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * np.exp(-(freedom + 1) / 2 * np.log1p(x**2 / freedom))
    inside = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])]) * x[1] / 2
    return float(np.interp(CONFIDENCE / 2, inside, x))
