"""Differences of experiments from a reference: intervals, tests, verdicts, and the cost of a decision.

evaluation/intervals.py explains the two terms of an interval, over images and over seeds. The seed term of a difference
has only S − 1 degrees of freedom for S seeds. If the experiments of a page vary equally between seeds, their seed
noise is estimated together. In the model y = experiment + seed + noise for the mean y of each run, the residuals of E
experiments and the reference have E (S − 1) degrees of freedom, and a difference has twice their variance.
`estimate_seed_noise` takes this variance or, if it is larger, the mean of the E variances of differences. This second
estimate stays right if the reference varies more than the experiments.

If the noise of an experiment is larger than the noise of the others, its pooled interval is too short. An F test
compares each experiment's residuals with the residuals of all others, with Bonferroni's correction (Cochran's test in
the form of 't Lam 2010, Analytica Chimica Acta 659, 68). Bartlett's test also reacts to small variances, for which
pooling is conservative, and fails for equal scores. Levene's test is undefined for two seeds, whose deviations from
their mean are equal. An experiment with larger noise gets the longer of its own interval and the pooled interval. If
the reference has larger noise, this applies to all experiments.

The p-value of a difference is the level at which its interval reaches zero. Holm (1979) corrects the p-values of a
page. Power is computed for normal scores and integrated over the estimates of both variances.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.optimize.elementwise import find_root
from scipy.special import chdtri, fdtrc, ndtr

from dj2mgm.evaluation.intervals import LEVEL, compute_image_variance, compute_student_quantile
from dj2mgm.verdict_kinds import VerdictKind

# Level of the test for larger seed noise. At 0.05, false alarms lengthen intervals of two seeds by 10 %.
POOLING_LEVEL = 0.02
POWER = 0.8
MAX_SEEDS, MAX_IMAGES = 100, 1_000_000  # no larger cost is reported
# Gauss-Legendre nodes and weights on [0, 1]
NODES, WEIGHTS = (part / 2 for part in np.polynomial.legendre.leggauss(40))
NODES += 0.5
SUM_ROUNDING = 1e-12  # relative error of sums
MIN_LOG_LEVEL = -230.0  # p-values below 1e-100 are not distinguished


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
        """Return the mean of each seed, (…, S)."""
        return self.sums.sum(axis=-1) / self.counts.sum()


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
        noisy: whether the experiment's own seed noise counts, because it is larger than the noise of the others.
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

    def half_width(self, level: float | np.ndarray = LEVEL) -> np.ndarray:
        """Return half the length of the interval that misses the true mean with probability `level` at most."""
        image_term = compute_student_quantile(self.image_df, level) ** 2 * self.image_variance
        return np.sqrt(image_term + compute_student_quantile(self.seed_df, level) ** 2 * self.seed_variance)

    @property
    def varies(self) -> np.ndarray:
        """Return whether the differences vary by more than rounding error."""
        return self.variance > (SUM_ROUNDING * np.asarray(self.mean)) ** 2

    @property
    def smallest_p_value(self) -> float:
        """P-value of the sign test, used if all differences are equal: a t-test is impossible then."""
        return 2.0 ** (1 - self.images)

    def p_value(self, null: float = 0.0) -> np.ndarray:
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

    def detectable(self, level: float = LEVEL) -> float:
        """Return the smallest true difference whose interval at `level` excludes zero with probability `POWER`."""
        error = float(np.sqrt(self.variance))
        if not self.varies:
            return 0.0 if self.smallest_p_value <= level else np.inf
        goal = DecisionGoal(0.0, level, level)
        largest = float(self.possible_half_widths(level)[0].max()) + 10 * error
        return float(brentq(lambda truth: goal.power(self, truth) - POWER, 0.0, largest, rtol=1e-6))

    def possible_half_widths(self, level: float) -> tuple[np.ndarray, np.ndarray]:
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

    def power(self, contrast: PairedContrast, truth: float) -> float:
        """Return the probability of a right verdict in studies like the contrast's, for a true difference `truth`."""
        error, truth = np.sqrt(contrast.variance), abs(truth)
        if not error > 0:
            return float(truth > 0 or self.margin >= 0)
        half_widths, weights = contrast.possible_half_widths(self.level)
        # largest difference that is shown to lie within the margin
        bounds = np.maximum(0, self.margin - contrast.possible_half_widths(self.level_of_equivalence)[0])
        equivalent = ndtr((np.minimum(bounds, half_widths) - truth) / error) - ndtr((-bounds - truth) / error)
        return float(weights @ (ndtr((truth - half_widths) / error) + equivalent))


@dataclass(frozen=True)
class DecisionCost:
    """Seeds and images that decide a difference with probability `POWER` if the true difference is as measured.

    Attributes:
        seeds: additional seeds; None if there is one seed, or if more seeds alone do not decide.
        images: additional images; None if more images alone do not decide.
        both: additional seeds and images together, if neither alone decides a difference of several seeds.
    """

    seeds: int | None = None
    images: int | None = None
    both: tuple[int, int] | None = None


@dataclass(frozen=True)
class ContrastVerdict:
    """Verdict on one difference of a page.

    Attributes:
        kind: the verdict.
        p_value: p-value under the hypothesis of no difference, corrected for the number of experiments.
        detectable: smallest true difference that is shown with probability `POWER`; None for one image.
        cost: cost of a decision; empty if the difference is decided.
    """

    kind: VerdictKind
    p_value: float
    detectable: float | None
    cost: DecisionCost


def contrast_with_reference(experiments: Sequence[PairedValues]) -> list[PairedContrast]:
    """Return the contrast of each experiment of a page, with the seed noise of all experiments with several seeds."""
    noise = estimate_seed_noise(experiments)
    contrasts = []
    for values, (variance, seed_df, noisy) in zip(experiments, noise, strict=True):
        image_part, image_df = compute_image_variance(values.sums, values.counts)
        seeds, images = values.sums.shape[-2:]
        mean, total = values.means.mean(axis=-1), int(values.counts.sum())
        seed_part = variance / seeds
        contrasts.append(PairedContrast(mean, total, images, seeds, image_part, image_df, seed_part, seed_df, noisy))
    return contrasts


def estimate_seed_noise(experiments: Sequence[PairedValues]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the variance of one seed's difference, its degrees of freedom, and whether the experiment is noisy.

    Experiments with one seed have no noise and infinite degrees of freedom. Equal results count once, and results that
    equal the reference's do not count, since stages are shared.
    """
    zero = np.zeros(experiments[0].sums.shape[:-2]) if experiments else np.zeros(())
    own_variances = [
        np.var(experiment.means, axis=-1, ddof=1) if len(experiment.seeds) > 1 else zero for experiment in experiments
    ]
    pool = _select_distinct([experiment for experiment in experiments if len(experiment.seeds) > 1])
    pooled = _pool_noise(pool) if len(pool) > 1 else None
    noise = []
    for values, own_variance in zip(experiments, own_variances, strict=True):
        own_df = len(values.seeds) - 1
        index = next((number for number, experiment in enumerate(pool) if _are_equal(experiment, values)), None)
        if not own_df:
            noise.append((zero, zero + np.inf, zero > 0))
        elif pooled is None or index is None:
            noise.append((own_variance, zero + own_df, zero > 0))
        else:
            own_square = compute_student_quantile(own_df) ** 2 * own_variance  # of half the interval's length
            is_noisy = own_square > compute_student_quantile(pooled.degrees_of_freedom) ** 2 * pooled.variance
            is_noisy &= pooled.noisy[index] | pooled.noisy_reference
            larger_variance = np.where(is_noisy, own_variance, pooled.variance)
            noise.append((larger_variance, np.where(is_noisy, own_df, pooled.degrees_of_freedom), is_noisy))
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


@dataclass(frozen=True)
class _PooledNoise:
    """Noise between seeds that several experiments share, as arrays with the shape of the contrasts.

    Attributes:
        variance: variance of a difference.
        degrees_of_freedom: degrees of freedom of the variance.
        noisy_reference: whether the reference is noisier than the experiments.
        noisy: whether each experiment is noisier than the others.
    """

    variance: np.ndarray
    degrees_of_freedom: int
    noisy_reference: np.ndarray
    noisy: list[np.ndarray]


def _pool_noise(experiments: list[PairedValues]) -> _PooledNoise:
    """Pool the seed noise of several experiments."""
    seeds = sorted({seed for experiment in experiments for seed in experiment.seeds})
    rows = [(0, seed) for seed in seeds]  # the reference, whose difference is zero
    rows += [(number, seed) for number, experiment in enumerate(experiments, start=1) for seed in experiment.seeds]
    leading_shape = experiments[0].sums.shape[:-2]
    values = np.concatenate(
        [np.zeros((*leading_shape, len(seeds))), *(experiment.means for experiment in experiments)], axis=-1
    )
    squares, degrees_of_freedom = _sum_residual_squares(rows, values)
    sums_of_squares = [
        experiment.means.var(axis=-1, ddof=1) * (len(experiment.seeds) - 1) for experiment in experiments
    ]
    mean_variance = sum(sums_of_squares) / sum(len(experiment.seeds) - 1 for experiment in experiments)
    variance = np.maximum(2 * squares / degrees_of_freedom, mean_variance)
    noisy = []
    for number in range(len(experiments) + 1):
        indices = [index for index, (row, _) in enumerate(rows) if row != number]
        other_squares, other_df = _sum_residual_squares([rows[index] for index in indices], values[..., indices])
        if other_df < 1:
            noisy.append(np.zeros(leading_shape, dtype=bool))
            continue
        own_df = degrees_of_freedom - other_df
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = ((squares - other_squares) / own_df) / (other_squares / other_df)
        p = fdtrc(own_df, other_df, np.nan_to_num(ratio)) * (len(experiments) + 1)
        noisy.append(p < POOLING_LEVEL)
    return _PooledNoise(variance, degrees_of_freedom, noisy[0], noisy[1:])


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


def apply_holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def decide(contrasts: Sequence[PairedContrast], margin: float, lower_is_better: bool = False) -> list[ContrastVerdict]:
    """Return the verdicts on the differences of a page.

    A difference is equivalent if its 95 % interval lies within the margin, and if the p-value of a difference beyond
    the margin, corrected by Holm, is small enough too. The probability that any true difference of zero is called
    better or worse is at most 5 %. The probability that any difference beyond the margin is called equivalent is at
    most 5 %, too.

    Args:
        contrasts: the differences, each of one study.
        margin: smallest difference that matters.
        lower_is_better: whether smaller scores are better.
    """
    measured = [contrast for contrast in contrasts if contrast.images > 1]
    p_different = iter(apply_holm_correction([float(contrast.p_value()) for contrast in measured]))
    p_beyond = iter(apply_holm_correction([_compute_p_beyond(contrast, margin) for contrast in measured]))
    p_values = [(next(p_different), next(p_beyond)) if contrast.images > 1 else (1.0, 1.0) for contrast in contrasts]
    kinds = [_judge(contrast, margin, lower_is_better, *p) for contrast, p in zip(contrasts, p_values, strict=True)]
    # levels at which Holm's method tests the next difference and the next equivalence
    levels = LEVEL / max(1, sum(p > LEVEL for p, _ in p_values)), LEVEL / max(1, sum(p > LEVEL for _, p in p_values))
    goal = DecisionGoal(margin, levels[0], min(LEVEL, 2 * levels[1]))
    verdicts = []
    for contrast, kind, (p, _) in zip(contrasts, kinds, p_values, strict=True):
        detectable = contrast.detectable(goal.level) if contrast.images > 1 else None
        cost = find_decision_cost(contrast, lambda seeds: goal) if kind == VerdictKind.UNDECIDED else DecisionCost()
        verdicts.append(ContrastVerdict(kind, p, detectable, cost))
    return verdicts


def find_decision_cost(contrast: PairedContrast, goal_after: Callable[[int], DecisionGoal]) -> DecisionCost:
    """Return the cost of deciding an undecided difference.

    Args:
        goal_after: function that returns the goal after a number of seeds.
    """

    def find_fewest_seeds(contrast: PairedContrast) -> int | None:
        def decides(more: int) -> bool:
            total = contrast.seeds + more
            return goal_after(total).power(contrast.with_seeds(total), truth) >= POWER

        return _find_smallest(decides, MAX_SEEDS)

    if contrast.images < 2:
        return DecisionCost()
    truth, goal, total = float(contrast.mean), goal_after(contrast.seeds), contrast.images
    seeds = find_fewest_seeds(contrast) if contrast.seeds > 1 else None
    images = _find_smallest(lambda more: goal.power(contrast.with_images(total + more), truth) >= POWER, MAX_IMAGES)
    if seeds or images or contrast.seeds < 2:
        return DecisionCost(seeds, images)
    while (total := 2 * total) <= MAX_IMAGES:
        if more := find_fewest_seeds(contrast.with_images(total)):
            return DecisionCost(both=(more, total - contrast.images))
    return DecisionCost()


def _judge(contrast: PairedContrast, margin: float, lower_is_better: bool, p: float, p_beyond: float) -> VerdictKind:
    if p_beyond <= LEVEL and abs(contrast.mean) + contrast.half_width() <= margin:
        return VerdictKind.EQUIVALENT
    if p > LEVEL:
        return VerdictKind.UNDECIDED
    return VerdictKind.BETTER if (contrast.mean > 0) != lower_is_better else VerdictKind.WORSE


def _compute_p_beyond(contrast: PairedContrast, margin: float) -> float:
    """Return the one-sided p-value of a difference of `margin` or more in either direction."""
    if abs(contrast.mean) > margin:
        return 1.0
    return float(max(contrast.p_value(margin), contrast.p_value(-margin))) / 2


def _find_smallest(decides: Callable[[int], bool], maximum: int) -> int | None:
    """Return the smallest number up to `maximum` that decides, by bisection; None if no number decides."""
    if not decides(maximum):
        return None
    low, high = 0, maximum
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
