"""Differences of experiments from a reference: intervals, tests, verdicts, and the cost of a decision.

evaluation/intervals.py explains the two terms of an interval, over images and over seeds. The seed term of a difference
has only S − 1 degrees of freedom for S seeds. If the experiments of a page vary equally between seeds, their seed
noise is estimated together. In the model y = experiment + seed + noise for the mean y of each run, the residuals of E
experiments and the reference have E (S − 1) degrees of freedom, and a difference has twice their variance. `seed_noise`
takes this or, if it is larger, the mean of the E variances of differences. That second estimate stays right if the
reference varies more than the experiments.

Noise of an experiment that is larger than that of the others would make its interval too short. It is searched for by
an F test of each experiment's residuals against those of all others, with Bonferroni's correction (Cochran's test in
the form of 't Lam 2010, Analytica Chimica Acta 659, 68). Bartlett's test also reacts to small variances, for which
pooling is conservative, and fails for equal scores; Levene's is undefined for two seeds, whose deviations from their
mean are equal. An experiment with larger noise gets the longer one of its own and the pooled interval. If the
reference has larger noise, all experiments do.

The p-value of a difference is the level at which its interval reaches zero. Holm (1979) corrects the p-values of a
page. Power is that of normal scores, integrated over the estimates of both variances.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.optimize.elementwise import find_root
from scipy.special import chdtri, fdtrc, ndtr

from dj2mgm.evaluation.intervals import LEVEL, image_variance, student_quantile

POOLING_LEVEL = (
    0.02  # level of the test for larger seed noise; at 0.05, false alarms lengthen intervals of two seeds by 10 %
)
POWER = 0.8
MAX_SEEDS, MAX_IMAGES = 100, 1_000_000  # no larger cost is stated
SHARES, WEIGHTS = (part / 2 for part in np.polynomial.legendre.leggauss(40))  # for integrals from 0 to 1
SHARES += 0.5
ROUNDING = 1e-12  # relative error of sums
MIN_LOG_LEVEL = -230.0  # p-values below 1e-100 are not distinguished

VerdictKind = Literal["better", "worse", "equivalent", "undecided"]


@dataclass(frozen=True)
class PairedValues:
    """Differences of one experiment from the reference, paired by seed and image.

    Attributes:
        seeds: (S,) their numbers.
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
        image_freedom: its degrees of freedom.
        seed_variance: part of training noise; 0 for one seed, whose difference is one of two models.
        seed_freedom: its degrees of freedom.
        noisy: whether the experiment's own seed noise counts, because it is larger than that of the others.
    """

    mean: np.ndarray
    values: int
    images: int
    seeds: int
    image_variance: np.ndarray
    image_freedom: float
    seed_variance: np.ndarray
    seed_freedom: np.ndarray
    noisy: np.ndarray

    @property
    def variance(self) -> np.ndarray:
        return self.image_variance + self.seed_variance

    def half(self, level: float | np.ndarray = LEVEL) -> np.ndarray:
        """Return half the length of the interval that misses the true mean with probability `level` at most."""
        of_images = student_quantile(self.image_freedom, level) ** 2 * self.image_variance
        return np.sqrt(of_images + student_quantile(self.seed_freedom, level) ** 2 * self.seed_variance)

    @property
    def varies(self) -> np.ndarray:
        """Return whether there is a variance; that of equal differences may be a rounding error."""
        return self.variance > (ROUNDING * np.asarray(self.mean)) ** 2

    @property
    def smallest_p_value(self) -> float:
        """Return the p-value of the sign test, for equal differences, whose variance of zero proves nothing."""
        return 2.0 ** (1 - self.images)

    def p_value(self, null: float = 0.0) -> np.ndarray:
        """Return the level at which the interval reaches `null`; that of the sign test if it has no width."""
        distance = np.asarray(np.abs(self.mean - null))
        variance, seed_variance = np.broadcast_arrays(self.image_variance, self.seed_variance)
        known = self.varies & (distance > 0)

        def excess(log_level: np.ndarray, distance: np.ndarray, of_images, of_seeds, seed_freedom) -> np.ndarray:
            level = np.exp(log_level)
            squared = student_quantile(self.image_freedom, level) ** 2 * of_images
            return squared + student_quantile(seed_freedom, level) ** 2 * of_seeds - distance**2

        scale = np.where(known, np.sqrt(variance + seed_variance), 1.0)  # for numbers of order one
        terms = [np.where(known, part / scale**2, 1.0) for part in (variance, seed_variance)]
        steps = np.where(known, distance / scale, 1.0)
        root = find_root(excess, (MIN_LOG_LEVEL, 0.0), args=(steps, *terms, self.seed_freedom))
        p = np.where(root.success, np.exp(root.x), np.exp(MIN_LOG_LEVEL))
        return np.where(known, p, np.where(distance > 0, self.smallest_p_value, 1.0))

    def detectable(self, level: float = LEVEL) -> float:
        """Return the smallest true difference whose interval at `level` excludes zero with probability `POWER`."""
        error = float(np.sqrt(self.variance))
        if not self.varies:
            return 0.0 if self.smallest_p_value <= level else np.inf
        goal = Goal(0.0, level, level)
        largest = float(self.possible_halves(level)[0].max()) + 10 * error
        return float(brentq(lambda truth: goal.chance(self, truth) - POWER, 0.0, largest, rtol=1e-6))

    def possible_halves(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Return values of `half` in repeated studies, and their probabilities.

        Both variances are estimated. Relative to their true values they are chi-squared numbers per degree of freedom,
        over whose quantiles a sum of Gauss and Legendre integrates.
        """
        parts = []
        for variance, freedom in (
            (self.image_variance, self.image_freedom),
            (self.seed_variance, self.seed_freedom),
        ):
            relative = chdtri(freedom, 1 - SHARES) / freedom if np.isfinite(freedom) else np.ones_like(SHARES)
            parts.append(student_quantile(freedom, level) ** 2 * variance * relative)
        squared = parts[0][:, None] + parts[1]
        return np.sqrt(squared).ravel(), np.outer(WEIGHTS, WEIGHTS).ravel()

    def with_seeds(self, seeds: int) -> "PairedContrast":
        """Return the expected contrast if every experiment of the page had this number of seeds."""
        freedom = self.seed_freedom * (seeds - 1) / (self.seeds - 1)
        return replace(self, seeds=seeds, seed_variance=self.seed_variance * self.seeds / seeds, seed_freedom=freedom)

    def with_images(self, images: int) -> "PairedContrast":
        """Return the expected contrast with another number of images."""
        more = images / self.images
        variance, freedom = self.image_variance / more, self.image_freedom * more
        return replace(self, images=images, image_variance=variance, image_freedom=freedom)


@dataclass(frozen=True)
class Goal:
    """Margin and levels at which a verdict decides a difference.

    Attributes:
        margin: smallest difference that matters.
        level: level of the interval that shows a difference.
        level_of_equivalence: level of the interval that shows equivalence.
    """

    margin: float
    level: float
    level_of_equivalence: float

    def chance(self, contrast: PairedContrast, truth: float) -> float:
        """Return the probability that studies like the contrast's decide rightly if this is the true difference."""
        error, truth = np.sqrt(contrast.variance), abs(truth)
        if not error > 0:
            return float(truth > 0 or self.margin >= 0)
        different, weights = contrast.possible_halves(self.level)
        inside = np.maximum(0, self.margin - contrast.possible_halves(self.level_of_equivalence)[0])
        equivalent = ndtr((np.minimum(inside, different) - truth) / error) - ndtr((-inside - truth) / error)
        return float(weights @ (ndtr((truth - different) / error) + equivalent))


@dataclass(frozen=True)
class DecisionCost:
    """Seeds and images that decide a difference with probability `POWER` if the true difference is the measured one.

    Attributes:
        seeds: additional seeds; None if there is one seed, or more seeds alone do not decide.
        images: additional images; None if they alone do not decide.
        both: additional seeds and images together, if neither alone decides a difference of several seeds.
    """

    seeds: int | None
    images: int | None
    both: tuple[int, int] | None


@dataclass(frozen=True)
class ContrastVerdict:
    """Verdict on one difference among those of a page.

    Attributes:
        kind: the verdict.
        p_value: p-value under the hypothesis of no difference, corrected for the number of experiments.
        detectable: true difference that is shown with probability `POWER`; None if it is not known (one image).
        cost: cost of a decision; empty if the difference is decided.
    """

    kind: VerdictKind
    p_value: float
    detectable: float | None
    cost: DecisionCost


def contrast_with_reference(experiments: Sequence[PairedValues]) -> list[PairedContrast]:
    """Return the contrast of each experiment of a page, with the seed noise of all that have several seeds."""
    noise = seed_noise(experiments)
    contrasts = []
    for values, (variance, freedom, noisy) in zip(experiments, noise, strict=True):
        of_images, image_freedom = image_variance(values.sums, values.counts)
        seeds, images = values.sums.shape[-2:]
        mean, total = values.means.mean(axis=-1), int(values.counts.sum())
        of_seeds = variance / seeds
        contrasts.append(PairedContrast(mean, total, images, seeds, of_images, image_freedom, of_seeds, freedom, noisy))
    return contrasts


def seed_noise(experiments: Sequence[PairedValues]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the variance of one seed's difference, its degrees of freedom, and whether the experiment is noisy.

    Experiments with one seed have no noise and infinite degrees of freedom. Equal results, and those that equal the
    reference's, count once, since stages are shared.
    """
    none = np.zeros(experiments[0].sums.shape[:-2]) if experiments else np.zeros(())
    own_variances = [
        np.var(experiment.means, axis=-1, ddof=1) if len(experiment.seeds) > 1 else none for experiment in experiments
    ]
    pooled = _distinct([experiment for experiment in experiments if len(experiment.seeds) > 1])
    if len(pooled) > 1:
        variance, freedom, noisy_reference, noisy = _pool(pooled)
    noise = []
    for values, variance_alone in zip(experiments, own_variances, strict=True):
        freedom_alone = len(values.seeds) - 1
        index = next((number for number, experiment in enumerate(pooled) if _equal(experiment, values)), None)
        if not freedom_alone:
            noise.append((none, none + np.inf, none > 0))
        elif len(pooled) < 2 or index is None:
            noise.append((variance_alone, none + freedom_alone, none > 0))
        else:
            is_noisy = student_quantile(freedom_alone) ** 2 * variance_alone > student_quantile(freedom) ** 2 * variance
            is_noisy &= noisy[index] | noisy_reference
            chosen = np.where(is_noisy, variance_alone, variance), np.where(is_noisy, freedom_alone, freedom)
            noise.append((*chosen, is_noisy))
    return noise


def _distinct(experiments: list[PairedValues]) -> list[PairedValues]:
    """Return the experiments whose results differ from the reference's and from each other's."""
    kept: list[PairedValues] = []
    for experiment in experiments:
        if np.any(experiment.sums) and not any(_equal(experiment, kept_experiment) for kept_experiment in kept):
            kept.append(experiment)
    return kept


def _equal(values: PairedValues, other_values: PairedValues) -> bool:
    return values is other_values or (
        values.seeds == other_values.seeds and np.array_equal(values.sums, other_values.sums)
    )


def _pool(experiments: list[PairedValues]) -> tuple[np.ndarray, int, np.ndarray, list[np.ndarray]]:
    """Return the pooled variance of a difference, its freedom, and the flags of the reference and each experiment."""
    seeds = sorted({seed for experiment in experiments for seed in experiment.seeds})
    rows = [(0, seed) for seed in seeds]  # the reference, whose difference is zero
    rows += [(number, seed) for number, experiment in enumerate(experiments, start=1) for seed in experiment.seeds]
    leading = experiments[0].sums.shape[:-2]
    values = np.concatenate(
        [np.zeros((*leading, len(seeds))), *(experiment.means for experiment in experiments)], axis=-1
    )
    squared, freedom = _residual_squares(rows, values)
    sums_of_squares = [
        experiment.means.var(axis=-1, ddof=1) * (len(experiment.seeds) - 1) for experiment in experiments
    ]
    mean_of_differences = sum(sums_of_squares) / sum(len(experiment.seeds) - 1 for experiment in experiments)
    variance = np.maximum(2 * squared / freedom, mean_of_differences)
    noisy = []
    for number in range(len(experiments) + 1):
        indices = [index for index, (row, _) in enumerate(rows) if row != number]
        rest, rest_freedom = _residual_squares([rows[index] for index in indices], values[..., indices])
        if rest_freedom < 1:
            noisy.append(np.zeros(leading, dtype=bool))
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = ((squared - rest) / (freedom - rest_freedom)) / (rest / rest_freedom)
        p = fdtrc(freedom - rest_freedom, rest_freedom, np.nan_to_num(ratio)) * (len(experiments) + 1)
        noisy.append(p < POOLING_LEVEL)
    return variance, freedom, noisy[0], noisy[1:]


def _residual_squares(rows: list[tuple[int, int]], values: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the squared residuals of the least-squares fit by experiment and seed, and their degrees of freedom.

    Args:
        rows: (N,) experiment and seed of each value.
        values: (…, N)
    """
    columns = [[row[part] == key for row in rows] for part in (0, 1) for key in sorted({row[part] for row in rows})]
    design = np.array(columns, dtype=float).T
    fit = design @ np.linalg.pinv(design)
    residuals = values - values @ fit.T
    return (residuals**2).sum(axis=-1), len(rows) - int(np.linalg.matrix_rank(design))


def holm(p_values: Sequence[float]) -> list[float]:
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
    better or worse is at most 5 %; so is the probability that any difference beyond the margin is called equivalent.

    Args:
        contrasts: the differences, each of one study.
        margin: smallest difference that matters.
        lower_is_better: whether smaller scores are better.
    """
    measured = [contrast for contrast in contrasts if contrast.images > 1]
    different = iter(holm([float(contrast.p_value()) for contrast in measured]))
    equivalent = iter(holm([_p_beyond(contrast, margin) for contrast in measured]))
    p_values = [(next(different), next(equivalent)) if contrast.images > 1 else (1.0, 1.0) for contrast in contrasts]
    kinds = [_kind(contrast, margin, lower_is_better, *p) for contrast, p in zip(contrasts, p_values, strict=True)]
    # levels at which Holm's method tests the next difference and the next equivalence
    levels = LEVEL / max(1, sum(p > LEVEL for p, _ in p_values)), LEVEL / max(1, sum(p > LEVEL for _, p in p_values))
    goal = Goal(margin, levels[0], min(LEVEL, 2 * levels[1]))
    verdicts = []
    for contrast, kind, (p, _) in zip(contrasts, kinds, p_values, strict=True):
        detectable = contrast.detectable(goal.level) if contrast.images > 1 else None
        cost = (
            find_decision_cost(contrast, lambda seeds: goal) if kind == "undecided" else DecisionCost(None, None, None)
        )
        verdicts.append(ContrastVerdict(kind, p, detectable, cost))
    return verdicts


def find_decision_cost(contrast: PairedContrast, goal_after: Callable[[int], Goal]) -> DecisionCost:
    """Return the cost of deciding an undecided difference.

    Args:
        goal_after: function that returns the goal after a number of seeds.
    """

    def fewest_seeds(contrast: PairedContrast) -> int | None:
        def decides(more: int) -> bool:
            total = contrast.seeds + more
            return goal_after(total).chance(contrast.with_seeds(total), truth) >= POWER

        return _fewest(decides, MAX_SEEDS)

    if contrast.images < 2:
        return DecisionCost(None, None, None)
    truth, here, total = float(contrast.mean), goal_after(contrast.seeds), contrast.images
    seeds = fewest_seeds(contrast) if contrast.seeds > 1 else None
    images = _fewest(lambda more: here.chance(contrast.with_images(total + more), truth) >= POWER, MAX_IMAGES)
    if seeds or images or contrast.seeds < 2:
        return DecisionCost(seeds, images, None)
    while (total := 2 * total) <= MAX_IMAGES:
        if more := fewest_seeds(contrast.with_images(total)):
            return DecisionCost(None, None, (more, total - contrast.images))
    return DecisionCost(None, None, None)


def _kind(contrast: PairedContrast, margin: float, lower_is_better: bool, p: float, p_beyond: float) -> VerdictKind:
    if p_beyond <= LEVEL and abs(contrast.mean) + contrast.half() <= margin:
        return "equivalent"
    if p > LEVEL:
        return "undecided"
    return "better" if (contrast.mean > 0) != lower_is_better else "worse"


def _p_beyond(contrast: PairedContrast, margin: float) -> float:
    """Return the one-sided p-value of a difference of `margin` or more in either direction."""
    if abs(contrast.mean) > margin:
        return 1.0
    return float(max(contrast.p_value(margin), contrast.p_value(-margin))) / 2


def _fewest(decides: Callable[[int], bool], maximum: int) -> int | None:
    """Return the smallest number up to `maximum` that decides, by bisection; None if none does."""
    if not decides(maximum):
        return None
    low, high = 0, maximum
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
