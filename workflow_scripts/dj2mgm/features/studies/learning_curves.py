"""Extrapolation of a score to more rows by a power law, with the interval of a prediction.

score(x) = a − b · u(x), u(x) = ((x / x_max)^(−c) − 1) / ((x_min / x_max)^(−c) − 1), plus normal noise

a is the score on all rows and b the gain from the fewest to all of them. For a given exponent c and standard deviation
σ of the noise this is a linear model, with flat priors of a and b. Exponents and σ are averaged over grids of even
logarithms, weighted by their marginal likelihood (Gelman et al., Bayesian Data Analysis, 14.2). A least-squares fit of
all parameters, with its covariance, is too sure of the exponent.

Exponents range from −0.5 to 3. Zero is the limit of logarithmic growth, and at 3 the score saturates.

A few runs may lie on a power law by chance. So σ has a lower bound: the noise of a mean over images, if a run's errors
on different images are independent. Noise between seeds that all images share comes on top.

The law is tested for lack of fit: the squared residuals of the means of equal numbers of rows, per degree of freedom,
are compared with the variance between seeds by an F test (Draper and Smith, Applied Regression Analysis, 2.1). With one
seed, the noise is taken to be twice the variance of a mean over images, as if seeds varied as images do. The test does
not see deviations that are smaller than the noise σ² / n of a mean over n seeds. So this variance is added for the law
at each number of rows, multiplied by the ratio of the test if that is above 1 (Birge 1932, Physical Review 40, 207).
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import combinations

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtrc, fdtrc, ndtr

from dj2mgm.evaluation.groups import find_score_range
from dj2mgm.evaluation.intervals import compute_image_variance
from dj2mgm.evaluation.run_scores import MetricValues
from dj2mgm.features.studies.study_table import PlainTable
from dj2mgm.reporting.comparison import HeadlineScore, format_difference, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.score_groups import DIFFERENCE, split_group

CURVE_LEVEL = 0.2  # 1 − the confidence of intervals
EXPONENTS = np.linspace(
    -0.5, 3.0, 142
)  # published exponents (arXiv 1712.00409, 2001.08361) and others; never exactly 0
GRID_ERROR = 1e-3  # deviation from the nearest of these exponents, relative to the range of scores
SCORE_ROUNDING = 1e-12
FIT_LEVEL = 0.05  # of the test for lack of fit
# σ, relative to the residuals of the best and of the worst exponent; other values have no weight
DEVIATIONS = 0.1, 1000.0
MIN_SIZES, MIN_RUNS = 3, 4


@dataclass(frozen=True)
class Extrapolation:
    """The median of a prediction, and its interval at `CURVE_LEVEL`."""

    median: float
    low: float
    high: float


class LearningCurve:
    """A power law through the scores of runs on different numbers of rows.

    Attributes:
        fits: whether the scores follow a power law. False also if that cannot be tested, because there are only
            `MIN_SIZES` numbers of rows.
    """

    def __init__(self, rows: Sequence[float], scores: Sequence[float], least_noise: float = 0.0):
        """Fit the law.

        Args:
            rows: (N,) numbers of rows; at least `MIN_SIZES` different ones, and `MIN_RUNS` runs.
            scores: (N,) of the runs.
            least_noise: lower bound of the noise's standard deviation, such as `estimate_least_noise` returns.
        """
        self.most, self.fewest = float(max(rows)), float(min(rows))
        sizes, values = np.asarray(rows, dtype=float), np.asarray(scores, dtype=float)
        if len(set(rows)) < MIN_SIZES or len(rows) < MIN_RUNS:
            raise ValueError(f"{len(rows)} runs on {len(set(rows))} numbers of rows are too few for a power law")
        df = len(sizes) - 2  # degrees of freedom
        u = self._compute_u(sizes[:, None], EXPONENTS)
        designs = np.stack([np.ones_like(u), -u], axis=-1).swapaxes(0, 1)  # (exponents, N, 2)
        self.covariances = np.linalg.inv(designs.swapaxes(1, 2) @ designs)  # of a and b, for σ = 1
        self.coefficients = (self.covariances @ designs.swapaxes(1, 2) @ values[:, None])[..., 0]
        squares = ((values - (designs @ self.coefficients[..., None])[..., 0]) ** 2).sum(axis=1)
        squares += 1e-12 * (1 + np.ptp(values)) ** 2  # equal scores have no noise
        residual = np.sqrt(squares / df)
        low = max(least_noise, DEVIATIONS[0] * residual.min())
        self.deviations = np.geomspace(low, DEVIATIONS[1] * max(low, residual.max()), 100)
        logs = 0.5 * np.linalg.slogdet(self.covariances)[1][:, None] - df * np.log(self.deviations)
        logs = logs - 0.5 * squares[:, None] / self.deviations**2
        self.weights = np.exp(logs - logs.max())  # (exponents, deviations)
        self.weights /= self.weights.sum()
        self.fits, self.misfit = self._test_fit(sizes, values, least_noise)

    def _test_fit(self, sizes: np.ndarray, values: np.ndarray, least_noise: float) -> tuple[bool, float]:
        """Return whether the law fits, and the variance of its misfit at a number of rows, relative to a run's noise.

        Args:
            sizes: (N,) numbers of rows.
            values: (N,) scores.
            least_noise: lower bound of the noise's standard deviation.
        """
        numbers, indices, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        means = np.bincount(indices, values) / counts
        mean_count, test_df, noise_df = len(sizes) / len(numbers), len(numbers) - 3, len(sizes) - len(numbers)
        u = self._compute_u(numbers[:, None], EXPONENTS)  # (numbers, exponents)
        residuals = means[:, None] - self.coefficients[:, 0] + self.coefficients[:, 1] * u
        squares = (counts[:, None] * residuals**2).sum(axis=0).min()
        rounding = (GRID_ERROR * np.ptp(values)) ** 2 + SCORE_ROUNDING**2
        if squares <= rounding:
            return True, 1 / mean_count
        if not test_df:
            return False, 1 / mean_count
        if noise_df:
            variance = max(((values - means[indices]) ** 2).sum() / noise_df, least_noise**2, rounding)
            p = float(fdtrc(test_df, noise_df, squares / test_df / variance))
        else:
            variance = max(2 * least_noise**2, rounding)
            p = float(chdtrc(test_df, squares / variance))
        return p > FIT_LEVEL, max(1.0, squares / test_df / variance) / mean_count

    def predict_score(self, rows: float) -> Extrapolation:
        """Return the score of another run on a number of rows."""
        return self._predict(rows, base=1.0, added=1 + self.misfit)

    def predict_gain(self, rows: float) -> Extrapolation:
        """Return the change of the score from all rows of the curve to another number, without a run's noise."""
        return self._predict(rows, base=0.0, added=2 * self.misfit)

    def _compute_u(self, rows: np.ndarray | float, exponents: np.ndarray) -> np.ndarray:
        """Return the law's falling term for each exponent: 1 at the fewest rows, 0 at the most."""
        return np.expm1(-exponents * np.log(rows / self.most)) / np.expm1(-exponents * np.log(self.fewest / self.most))

    def _predict(self, rows: float, base: float, added: float) -> Extrapolation:
        """Return the quantiles of the mixture of normal distributions; `added` is a variance relative to a run's."""
        u = self._compute_u(rows, EXPONENTS)
        predictors = np.stack([np.full_like(u, base), -u], axis=1)
        centers = (predictors * self.coefficients).sum(axis=1)[:, None]
        factors = np.einsum("ei,eij,ej->e", predictors, self.covariances, predictors) + added
        widths = np.sqrt(factors)[:, None] * self.deviations

        def quantile(share: float) -> float:
            def excess(value: float) -> float:
                return float((self.weights * ndtr((value - centers) / widths)).sum()) - share

            far = 10 * widths.max()
            return float(brentq(excess, centers.min() - far, centers.max() + far, xtol=1e-9))

        return Extrapolation(*(quantile(share) for share in (0.5, CURVE_LEVEL / 2, 1 - CURVE_LEVEL / 2)))


def estimate_least_noise(runs: Sequence[MetricValues]) -> float:
    """Return the standard deviation of a run's mean by errors that are independent between images; 0 for one image.

    It is the root of half of the mean variance of all differences of two runs.

    Args:
        runs: values of two or more runs on the same images.

    Raises:
        InputError: an image has different numbers of values.
    """
    differences = [run - other_run for run, other_run in combinations(runs, 2)]
    variances = [compute_image_variance(difference.sums[None], difference.counts)[0] for difference in differences]
    return float(np.sqrt(np.nan_to_num(np.mean(variances)) / 2))


NO_EXTRAPOLATION = "no extrapolation: the scores are not shown to follow a power law"
MORE_ROWS = 1000  # additional rows of the advice; at most as many as there are


def build_curve_table(experiments: list[ExperimentResults], headline: HeadlineScore) -> list[PlainTable]:
    """Return the table of all learning curves; no table without variants on shares of the rows."""
    shares = [experiment.config.jsonl.fraction for experiment in experiments]
    sources = dict.fromkeys(name for share in shares if isinstance(share, dict) for name in share)
    curves = [(source, _list_points(experiments, headline, source)) for source in [None, *sources]]
    rows = [_build_row(source, points, headline) for source, points in curves if _is_curve(points)]
    note = (
        f"A power law is fitted to the {headline.title} of runs on shares of the rows. Each share contains the smaller "
        f"ones. All intervals have a level of {100 * (1 - CURVE_LEVEL):.0f} %. “On twice as many” predicts the score "
        "of one more run, and “change by more rows” the change of the mean score. In the row of a source, only the "
        "rows of this source grow. The extrapolation holds only for further rows of the same kind."
    )
    heads = ["Source", "Samples", "Score on all of them", "On twice as many", "Change by more rows"]
    return [PlainTable("Learning curve", note, heads, rows)] if rows else []


def _is_curve(points: list[tuple[int, MetricValues]]) -> bool:
    return len({rows for rows, _ in points}) >= MIN_SIZES and len(points) >= MIN_RUNS


def _list_points(
    experiments: list[ExperimentResults], headline: HeadlineScore, source: str | None
) -> list[tuple[int, MetricValues]]:
    """Return rows and scores of the runs on all rows, and on shares of one source's rows or of all."""
    points = []
    for experiment in experiments:
        share = experiment.config.jsonl.fraction
        reduced = [*share] if isinstance(share, dict) else [None]
        if experiment.control is not None or (share != 1 and reduced != [source]):
            continue
        for run in experiment.runs:
            values = run.scores.groups.get(headline.group, {}).get(headline.metric)
            if values is not None and (rows := count_trained_samples(run, source)):
                points.append((rows, values))
    return points


def count_trained_samples(run: RunResults, source: str | None) -> int:
    """Return the number of samples that a run trains on in both stages; of one source, or of all."""
    counts = run.jsonl.files.values()
    if source is not None:
        return sum(file.sources[source].rows_out for file in counts if source in file.sources)
    return sum(file.rows_out for file in counts)


def _build_row(source: str | None, points: list[tuple[int, MetricValues]], headline: HeadlineScore) -> list[str]:
    """Return the cells of a learning curve: rows, score, and extrapolations, limited to scores that are possible."""
    row_counts, values = zip(*points, strict=True)
    curve = LearningCurve(row_counts, [value.mean for value in values], estimate_least_noise(values))
    max_rows, extra_rows = int(curve.most), min(MORE_ROWS, int(curve.most))
    score, change = partial(format_score, headline.metric), partial(format_difference, headline.metric)
    best = [value.mean for row_count, value in points if row_count == max_rows]
    measured = ["all" if source is None else source, format_integer(max_rows), score(sum(best) / len(best))]
    if not curve.fits:
        return [*measured, NO_EXTRAPOLATION, "–"]
    doubled = curve.predict_score(2 * max_rows)
    if split_group(headline.group)[1] != DIFFERENCE:
        ends = find_score_range(headline.metric)
        doubled = Extrapolation(*(min(max(value, ends[0]), ends[1]) for value in astuple(doubled)))

    def describe(show: partial, extrapolation: Extrapolation) -> str:
        return f"{show(extrapolation.median)} ({show(extrapolation.low)} to {show(extrapolation.high)})"

    return [
        *measured,
        describe(score, doubled),
        f"{format_integer(extra_rows)} more: {describe(change, curve.predict_gain(max_rows + extra_rows))}",
    ]
