"""Differences of experiments from a reference: intervals, tests, and the power to decide a difference.

evaluation/intervals.py explains the two terms of an interval, over images and over seeds. The p-value of a difference
is the level at which its interval reaches zero. Power is computed for normal scores and integrated over the estimates
of both variances. The noise between seeds is pooled over experiments of a page with the same number of seeds.

The difference of an experiment from the reference varies between S seeds by the noise of the experiment, σ_e², and that
of the reference, σ_r². In the model d = experiment + seed + noise for the mean difference d of each run, the residuals
of E experiments estimate σ_e² with (E − 1)(S − 1) degrees of freedom. All differences share the reference's noise, so
that σ_r² has only S − 1, however many experiments there are. The pooled variance of a difference is

    V = max(mean variance of the differences, 2 B) = A + (1 − 1/E) B

B is the residual mean square, and A the rest, the noise of the seeds' means over experiments. With 2 B as a lower
bound, the reference is at least as noisy as the experiments. If the variance v of an experiment's own differences is
larger than V, it replaces V. It is then the sum of V', the pooled variance of the other experiments, and the excess
over it. Both sums have the degrees of freedom of a sum of independent variances (Satterthwaite 1946, Biometrics
Bulletin 2, 110):

    ν = V² / (A² / (S − 1) + ((1 − 1/E) B)² / ((E − 1)(S − 1)))      v² / (V'² / ν' + (v − V')² / (S − 1))

If the reference or the experiment dominates, they approach S − 1. Only experiments with the same number of seeds are
pooled. Others may have precise estimates of a smaller noise, which hide that an experiment with two seeds is noisier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.optimize.elementwise import find_root
from scipy.special import chdtri, fdtrc, ndtr

from dj2mgm.evaluation.intervals import LEVEL, compute_image_variance, compute_student_quantile


@dataclass(frozen=True)
class PairedValues:
    """Differences of one experiment from the reference, paired by seed and image.

    Attributes:
        seeds: (S,) numbers of the seeds.
        sums: (…, S, U) sum of each image's values, for any number of studies at once.
        counts: (U,) number of each image's values.
    """

    seeds: tuple[int, ...]
    sums: np.ndarray
    counts: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean of each seed, (…, S)."""
        return self.sums.sum(axis=-1) / self.counts.sum()


def estimate_seed_noise(experiments: Sequence[PairedValues]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the variance of one seed's difference, its degrees of freedom, and whether the experiment is noisy.

    An experiment is noisy if its own variance is larger than the pooled one. Experiments with one seed have no noise
    and infinite degrees of freedom. Equal results count once, and results that equal the reference's do not count,
    since stages are shared.
    """
    zero = np.zeros(experiments[0].sums.shape[:-2]) if experiments else np.zeros(())
    distinct = _select_distinct([experiment for experiment in experiments if len(experiment.seeds) > 1])
    noise = []
    for values in experiments:
        own_df = len(values.seeds) - 1
        own_variance = np.var(values.means, axis=-1, ddof=1) if own_df else zero
        pool = [experiment for experiment in distinct if len(experiment.seeds) == len(values.seeds)]
        others = [experiment for experiment in pool if not _are_equal(experiment, values)]
        if not own_df:
            noise.append((zero, zero + np.inf, zero > 0))
        elif len(pool) < 2 or len(others) == len(pool):
            noise.append((own_variance, zero + own_df, zero > 0))
        else:
            (variance, pooled_df), (other_variance, other_df) = _pool_noise(pool), _pool_noise(others)
            explained = np.minimum(own_variance, other_variance)
            df = _combine_degrees_of_freedom((explained, other_df), (own_variance - explained, own_df))
            noisy = own_variance > variance
            noise.append((np.maximum(own_variance, variance), np.where(noisy, df, pooled_df), noisy))
    return noise


def _select_distinct(experiments: list[PairedValues]) -> list[PairedValues]:
    """Return the experiments whose results differ from the reference's and from each other's."""
    distinct: list[PairedValues] = []
    for experiment in experiments:
        if np.any(experiment.sums) and not any(_are_equal(experiment, other) for other in distinct):
            distinct.append(experiment)
    return distinct


def _are_equal(values: PairedValues, other_values: PairedValues) -> bool:
    return values is other_values or (
        values.seeds == other_values.seeds and np.array_equal(values.sums, other_values.sums)
    )


def _pool_noise(experiments: list[PairedValues]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pooled variance of a difference, and its degrees of freedom, in the shape of the contrasts."""
    rows = [(number, seed) for number, experiment in enumerate(experiments) for seed in experiment.seeds]
    values = np.concatenate([experiment.means for experiment in experiments], axis=-1)
    squares, residual_df = _sum_residual_squares(rows, values)
    residual_variance = squares / residual_df if residual_df else 0 * squares  # no two experiments share two seeds
    own_dfs = [len(experiment.seeds) - 1 for experiment in experiments]
    own_squares = [
        experiment.means.var(axis=-1, ddof=1) * own_df for experiment, own_df in zip(experiments, own_dfs, strict=True)
    ]
    variance = np.maximum(sum(own_squares) / sum(own_dfs), 2 * residual_variance)
    own_part = (1 - 1 / len(experiments)) * residual_variance
    df = _combine_degrees_of_freedom((variance - own_part, np.mean(own_dfs)), (own_part, max(1, residual_df)))
    return variance, df


def _combine_degrees_of_freedom(*parts: tuple[np.ndarray, np.ndarray | float]) -> np.ndarray:
    """Return Satterthwaite's degrees of freedom of a sum of independent variances, given with their own.

    A sum of zero has those of the last part.
    """
    total = sum(variance for variance, _ in parts)
    shares = [variance / np.where(total > 0, total, 1.0) for variance, _ in parts]
    shares[-1] = np.where(total > 0, shares[-1], 1.0)
    return 1 / sum(share**2 / df for share, (_, df) in zip(shares, parts, strict=True))


def _sum_residual_squares(rows: list[tuple[int, int]], values: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the squared residuals' sum of the least-squares fit by experiment and seed, and its degrees of freedom.

    Args:
        rows: (N,) experiment and seed of each value.
        values: (…, N)
    """
    columns = [[row[part] == key for row in rows] for part in (0, 1) for key in sorted({row[part] for row in rows})]
    design = np.array(columns, dtype=float).T
    fit = design @ np.linalg.pinv(design)
    residuals = values - values @ fit.T
    return (residuals**2).sum(axis=-1), len(rows) - int(np.linalg.matrix_rank(design))


POWER = 0.8
# Gauss-Legendre nodes and weights on [0, 1]
NODES, WEIGHTS = (part / 2 for part in np.polynomial.legendre.leggauss(40))
NODES += 0.5
SUM_ROUNDING = 1e-12  # relative error of sums
MIN_LOG_LEVEL = -230.0  # p-values below 1e-100 are not distinguished
LARGER_NOISE_LEVEL = 0.02  # level of the test whether seeds vary more than images


@dataclass(frozen=True)
class PairedContrast:
    """Difference of an experiment from the reference, with the two parts of its squared standard error.

    All values but `values`, `images` and `seeds` may be arrays (…), for several studies at once.

    Attributes:
        mean: mean over values and seeds.
        values: number of values of one seed.
        images: number of images.
        seeds: number of seeds.
        image_variance: part of the choice of images; NaN for one image.
        image_df: degrees of freedom of `compute_image_variance`.
        seed_variance: part of training noise; 0 for one seed, because two single models are compared.
        seed_df: degrees of freedom of `seed_variance`.
        noisy: whether the experiment's own seed noise counts, because it is larger than the pooled or assumed noise.
    """

    mean: np.ndarray
    values: int
    images: int
    seeds: int
    image_variance: np.ndarray
    image_df: float
    seed_variance: np.ndarray
    seed_df: np.ndarray
    noisy: np.ndarray

    @property
    def variance(self) -> np.ndarray:
        return self.image_variance + self.seed_variance

    def compute_half_width(self, level: float | np.ndarray = LEVEL) -> np.ndarray:
        """Return half the length of the interval that misses the true mean with probability `level` at most."""
        image_term = compute_student_quantile(self.image_df, level) ** 2 * self.image_variance
        return np.sqrt(image_term + compute_student_quantile(self.seed_df, level) ** 2 * self.seed_variance)

    @property
    def varies(self) -> np.ndarray:
        """Mask of the differences that vary by more than rounding error."""
        return self.variance > (SUM_ROUNDING * np.asarray(self.mean)) ** 2

    @property
    def smallest_p_value(self) -> float:
        """P-value of the sign test, used if all differences are equal: a t-test is impossible then."""
        return 2.0 ** (1 - self.images)

    def compute_p_value(self, null: float = 0.0) -> np.ndarray:
        """Return the level at which the interval reaches `null`, or the sign test's p-value if it has no width."""
        distance = np.asarray(np.abs(self.mean - null))
        variance, seed_variance = np.broadcast_arrays(self.image_variance, self.seed_variance)
        has_value = self.varies & (distance > 0)

        def excess(log_level: np.ndarray, distance: np.ndarray, image_part, seed_part, seed_df) -> np.ndarray:
            level = np.exp(log_level)
            image_term = compute_student_quantile(self.image_df, level) ** 2 * image_part
            return image_term + compute_student_quantile(seed_df, level) ** 2 * seed_part - distance**2

        scale = np.where(has_value, np.sqrt(variance + seed_variance), 1.0)  # for numbers of order one
        parts = [np.where(has_value, part / scale**2, 1.0) for part in (variance, seed_variance)]
        scaled_distance = np.where(has_value, distance / scale, 1.0)
        root = find_root(excess, (MIN_LOG_LEVEL, 0.0), args=(scaled_distance, *parts, self.seed_df))
        p = np.where(root.success, np.exp(root.x), np.exp(MIN_LOG_LEVEL))
        return np.where(has_value, p, np.where(distance > 0, self.smallest_p_value, 1.0))

    def compute_detectable(self, level: float = LEVEL) -> float:
        """Return the smallest true difference whose interval at `level` excludes zero with probability `POWER`."""
        error = float(np.sqrt(self.variance))
        if not self.varies:
            return 0.0 if self.smallest_p_value <= level else np.inf
        goal = DecisionGoal(0.0, level, level)
        largest = float(self.list_possible_half_widths(level)[0].max()) + 10 * error
        return float(brentq(lambda truth: goal.compute_power(self, truth) - POWER, 0.0, largest, rtol=1e-6))

    def estimate_detectable(self, level: float = LEVEL) -> tuple[float, float, float]:
        """Return the detectable difference for the medians of the possible true variances, and its 80 % interval.

        The square of the difference is about a sum of a term of each variance. The intervals of the terms are combined
        as distances from the sum (Zou and Donner 2008, Statistics in Medicine 27, 1693).
        """
        if not self.varies:
            return (self.compute_detectable(level),) * 3

        def compute_square(image_share: float, seed_share: float) -> float:
            return self.with_noise_quantiles(image_share, seed_share).compute_detectable(level) ** 2

        middle = compute_square(0.5, 0.5)
        less, more = (
            float(np.hypot(compute_square(share, 0.5) - middle, compute_square(0.5, share) - middle))
            for share in (0.1, 0.9)
        )
        return float(np.sqrt(middle)), float(np.sqrt(max(0.0, middle - less))), float(np.sqrt(middle + more))

    def with_noise_quantiles(self, image_share: float = 0.5, seed_share: float = 0.5) -> "PairedContrast":
        """Return the contrast with variances that exceed the true ones with these probabilities.

        An estimated variance divided by the true one is a chi-squared number per degree of freedom. With two seeds, the
        median of this ratio is 0.45, so two of three estimates are smaller than the true variance.
        """
        image_variance = self.image_variance * self.image_df / chdtri(self.image_df, image_share)
        if not np.isfinite(self.seed_df):
            return replace(self, image_variance=image_variance)
        seed_variance = self.seed_variance * self.seed_df / chdtri(self.seed_df, seed_share)
        return replace(self, image_variance=image_variance, seed_variance=seed_variance)

    def list_possible_half_widths(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Return values of `half_width` in repeated studies, and their probabilities.

        Both variances are estimated. An estimate divided by the true variance is a chi-squared number per degree of
        freedom. Gauss-Legendre quadrature integrates over the quantiles of this number.
        """
        terms = []
        for variance, degrees_of_freedom in (
            (self.image_variance, self.image_df),
            (self.seed_variance, self.seed_df),
        ):
            ratios = np.ones_like(NODES)  # of estimate and true variance
            if np.isfinite(degrees_of_freedom):
                ratios = chdtri(degrees_of_freedom, 1 - NODES) / degrees_of_freedom
            terms.append(compute_student_quantile(degrees_of_freedom, level) ** 2 * variance * ratios)
        squares = terms[0][:, None] + terms[1]
        return np.sqrt(squares).ravel(), np.outer(WEIGHTS, WEIGHTS).ravel()

    def with_seeds(self, seeds: int) -> "PairedContrast":
        """Return the expected contrast if every experiment of the page had this number of seeds."""
        seed_df = self.seed_df * (seeds - 1) / (self.seeds - 1)
        return replace(self, seeds=seeds, seed_variance=self.seed_variance * self.seeds / seeds, seed_df=seed_df)

    def with_images(self, images: int) -> "PairedContrast":
        """Return the expected contrast with another number of images."""
        ratio = images / self.images
        variance, image_df = self.image_variance / ratio, self.image_df * ratio
        return replace(self, images=images, image_variance=variance, image_df=image_df)


@dataclass(frozen=True)
class DecisionGoal:
    """Margin and levels at which a verdict decides a difference.

    Attributes:
        margin: smallest difference that matters.
        level: level of the interval that shows a difference.
        level_of_equivalence: level of the interval that shows equivalence.
    """

    margin: float
    level: float
    level_of_equivalence: float

    def compute_power(self, contrast: PairedContrast, truth: float) -> float:
        """Return the probability of a right verdict in studies like the contrast's, for a true difference `truth`."""
        error, truth = np.sqrt(contrast.variance), abs(truth)
        if not contrast.varies:  # the sign test decides
            return float(contrast.smallest_p_value <= self.level and (truth > 0 or self.margin >= 0))
        half_widths, weights = contrast.list_possible_half_widths(self.level)
        # largest difference that is shown to lie within the margin
        bounds = np.maximum(0, self.margin - contrast.list_possible_half_widths(self.level_of_equivalence)[0])
        equivalent = ndtr((np.minimum(bounds, half_widths) - truth) / error) - ndtr((-bounds - truth) / error)
        return float(weights @ (ndtr((truth - half_widths) / error) + equivalent))


def contrast_with_reference(experiments: Sequence[PairedValues]) -> list[PairedContrast]:
    """Return the contrast of each experiment of a page, with the seed noise of those with as many seeds."""
    noise = estimate_seed_noise(experiments)
    contrasts = []
    for values, (variance, seed_df, noisy) in zip(experiments, noise, strict=True):
        image_part, image_df = compute_image_variance(values.sums, values.counts)
        seeds, images = values.sums.shape[-2:]
        mean, total = values.means.mean(axis=-1), int(values.counts.sum())
        seed_part = variance / seeds
        contrasts.append(PairedContrast(mean, total, images, seeds, image_part, image_df, seed_part, seed_df, noisy))
    return contrasts


def contrast_with_base(values: PairedValues) -> PairedContrast:
    """Return the contrast of trained models with the model before training.

    A few seeds do not show how much trainings vary: with two, Student's t is 12.7, and with one it is unknown. Images
    are many. So a training is assumed to vary as the mean over images does, which is an upper bound if seeds vary less:

        variance = V_images + V_run / S

    V_images is the jackknife variance of the mean over S seeds, and V_run the mean variance of a single run. The
    images are shared, so more seeds do not reduce V_images. If an F test of the variance between seeds shows that
    trainings vary more than images, this variance with its S − 1 degrees of freedom counts, as in `PairedContrast`.
    The expected variance between seeds in this test includes the noise of single scores, V_run − V_shared.
    """
    contrast = contrast_with_reference([values])[0]
    if contrast.images == 1:
        return contrast
    runs = [compute_image_variance(values.sums[..., [run], :], values.counts)[0] for run in range(contrast.seeds)]
    run_variance = np.mean(runs, axis=0)
    image_df = np.full_like(run_variance, contrast.image_df)
    assumed = replace(contrast, seed_variance=run_variance / contrast.seeds, seed_df=image_df)
    if contrast.seeds == 1:
        return assumed
    score_variance = np.maximum(0, run_variance - contrast.image_variance) * contrast.seeds / (contrast.seeds - 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal scores of all images
        ratio = contrast.seed_variance * contrast.seeds / (run_variance + score_variance)
    noisy = fdtrc(contrast.seeds - 1, contrast.image_df, np.nan_to_num(ratio)) < LARGER_NOISE_LEVEL
    noisy &= contrast.compute_half_width() > assumed.compute_half_width()
    return replace(
        contrast,
        seed_variance=np.where(noisy, contrast.seed_variance, assumed.seed_variance),
        seed_df=np.where(noisy, contrast.seed_df, assumed.seed_df),
        noisy=noisy,
    )
