"""Extrapolation of a score to more rows by a power law, with the interval of a prediction.

score(x) = a − b · u(x), u(x) = ((x / x_max)^(−c) − 1) / ((x_min / x_max)^(−c) − 1), plus normal noise

a is the score on all rows and b the gain from the fewest to all of them. For a given exponent c this is a linear model,
whose prediction with flat priors of a, b and log σ has a Student distribution with N − 2 degrees of freedom. Exponents
are averaged over a grid of even logarithms, weighted by their marginal likelihood (Gelman et al., Bayesian Data
Analysis, 14.2). A least-squares fit of all three parameters, with its covariance, is too sure of the exponent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr

CURVE_LEVEL = 0.2  # 1 − the confidence of intervals
EXPONENTS = np.geomspace(0.05, 2.0, 150)  # published exponents (arXiv 1712.00409, 2001.08361), and larger ones
MIN_SIZES, MIN_RUNS = 3, 4


@dataclass(frozen=True)
class Extrapolation:
    """The median of a prediction, and its interval at `CURVE_LEVEL`."""

    median: float
    low: float
    high: float


class LearningCurve:
    """A power law through the scores of runs on different numbers of rows."""

    def __init__(self, rows: Sequence[float], scores: Sequence[float]):
        """Fit the law.

        Args:
            rows: (N,) numbers of rows; at least `MIN_SIZES` different ones, and `MIN_RUNS` runs.
            scores: (N,) of the runs.
        """
        self.most, self.fewest = float(max(rows)), float(min(rows))
        sizes, values = np.asarray(rows, dtype=float), np.asarray(scores, dtype=float)
        if len(set(rows)) < MIN_SIZES or len(rows) < MIN_RUNS:
            raise ValueError(f"{len(rows)} runs on {len(set(rows))} numbers of rows are too few for a power law")
        self.df = len(sizes) - 2  # degrees of freedom
        weights, self.laws = [], []
        tiny = 1e-12 * (1 + np.ptp(values)) ** 2  # equal scores have no noise
        for exponent in EXPONENTS:
            design = np.stack([np.ones_like(sizes), -self._compute_u(sizes, exponent)], axis=1)
            covariance = np.linalg.inv(design.T @ design)
            coefficients = covariance @ design.T @ values
            squares = float(((values - design @ coefficients) ** 2).sum()) + tiny
            self.laws.append((exponent, coefficients, covariance * squares / self.df, squares / self.df))
            weights.append(0.5 * np.linalg.slogdet(covariance)[1] - 0.5 * self.df * np.log(squares))
        self.weights = np.exp(np.array(weights) - max(weights))
        self.weights /= self.weights.sum()

    def score_at(self, rows: float) -> Extrapolation:
        """Return the score of another run on a number of rows."""
        return self._predict(rows, base=1.0, noise=True)

    def gain_at(self, rows: float) -> Extrapolation:
        """Return the change of the score from all rows of the curve to another number, without a run's noise."""
        return self._predict(rows, base=0.0, noise=False)

    def _compute_u(self, rows: np.ndarray, exponent: float) -> np.ndarray:
        """Return u of the rows."""
        return np.expm1(-exponent * np.log(rows / self.most)) / np.expm1(-exponent * np.log(self.fewest / self.most))

    def _predict(self, rows: float, base: float, noise: bool) -> Extrapolation:
        """Return the quantiles of the mixture of Student distributions."""
        means, scales = [], []
        for exponent, coefficients, covariance, variance in self.laws:
            predictors = np.array([base, -float(self._compute_u(np.array(rows), exponent))])
            means.append(predictors @ coefficients)
            scales.append(np.sqrt(predictors @ covariance @ predictors + noise * variance))
        centers, widths = np.array(means), np.array(scales)

        def quantile(share: float) -> float:
            def excess(value: float) -> float:
                return float(self.weights @ stdtr(self.df, (value - centers) / widths)) - share

            far = 1e4 * widths.max()
            return float(brentq(excess, centers.min() - far, centers.max() + far, xtol=1e-9))

        return Extrapolation(*(quantile(share) for share in (0.5, CURVE_LEVEL / 2, 1 - CURVE_LEVEL / 2)))
