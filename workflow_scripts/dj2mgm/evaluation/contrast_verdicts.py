"""Verdicts on the differences of a page, or of a comparison after each seed, and the cost of deciding.

Holm (1979) corrects the p-values of a page. Looks after each seed have an error rate that holds for all looks together.

A 95 % interval that is looked at ten times misses the true difference more often than in 5 of 100 cases. Repeated
confidence intervals (Jennison and Turnbull 1989, JRSS B 51, 305) are longer at early looks, so that all of them
together contain the difference with a probability of 95 %. A verdict that follows from any of them is therefore right
with this probability, whether it is better, worse or equivalent.

The level of each look follows from alpha spending (Lan and DeMets 1983, Biometrika 70, 659): after a share t of the
budget's seeds, the probability of an error is `SPENT_SHARE` · 5 % · t^`SPENDING_EXPONENT` at most (Kim and DeMets
1987). The rest is reserved for a larger budget, which spends the same share of it. A report with several of the same
seeds is an earlier look that has spent this share, and all looks of a decision spend the same share of its rest.

A mean over k seeds is truth + noise of the images + noise of the seeds. The images are the same at all looks, so means
after j < k seeds have a correlation of sqrt(j / k) without image noise, and a larger one with it. Levels are computed
for the least favorable case, which is no image noise. The looks are then Student's t statistics of the first k of n
normal numbers. Levels for known variances would permit errors in up to 7 instead of 5 of 100 cases, because the
variance of two or three seeds is small by chance (compare Jennison and Turnbull 1991, Biometrika 78, 133, who integrate
this process). Here the process is drawn `RANDOM_PATHS` times. The standard error of the spent probability is 0.05
points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.special import stdtr

from dj2mgm.evaluation.contrasts import POWER, DecisionGoal, PairedContrast
from dj2mgm.evaluation.intervals import LEVEL, compute_student_quantile
from dj2mgm.settings.targets import MIN_SEEDS
from dj2mgm.verdict_kinds import VerdictKind

MAX_SEEDS, MAX_IMAGES = 100, 1_000_000  # no larger cost is reported
# Share of the remaining error probability that a page or a budget of `decide` spends. The rest is left to `decide`, or
# to a larger budget.
SPENT_SHARE = 0.9
VERDICT_LEVEL = SPENT_SHARE * LEVEL  # of the corrected p-values of a page
SPENDING_EXPONENT = 2.0
RANDOM_PATHS, PATHS_OF_COST = 200_000, 20_000
MIN_LEVEL = 1e-15  # level of a look that decides nothing


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
        detectable: estimate of the smallest true difference that is shown with probability `POWER`, and the ends of its
            80 % interval; None for one image.
        cost: cost of a decision; empty if the difference is decided.
    """

    kind: VerdictKind
    p_value: float
    detectable: tuple[float, float, float] | None
    cost: DecisionCost


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
    better or worse is at most `VERDICT_LEVEL`, and so is the probability that any difference beyond the margin is
    called equivalent.

    Args:
        contrasts: the differences, each of one study.
        margin: smallest difference that matters.
        lower_is_better: whether smaller scores are better.
    """
    measured = [contrast for contrast in contrasts if contrast.images > 1]
    p_different = iter(apply_holm_correction([float(contrast.compute_p_value()) for contrast in measured]))
    p_beyond = iter(apply_holm_correction([_compute_p_beyond(contrast, margin) for contrast in measured]))
    p_values = [(next(p_different), next(p_beyond)) if contrast.images > 1 else (1.0, 1.0) for contrast in contrasts]
    kinds = [_judge(contrast, margin, lower_is_better, *p) for contrast, p in zip(contrasts, p_values, strict=True)]
    # levels at which Holm's method tests the next difference and the next equivalence
    levels = [VERDICT_LEVEL / max(1, sum(p > VERDICT_LEVEL for p in column)) for column in zip(*p_values, strict=True)]
    goal = DecisionGoal(margin, levels[0], min(LEVEL, 2 * levels[1])) if levels else None
    verdicts = []
    for contrast, kind, (p, _) in zip(contrasts, kinds, p_values, strict=True):
        detectable = contrast.estimate_detectable(goal.level) if contrast.images > 1 else None
        cost = DecisionCost()
        if kind == VerdictKind.UNDECIDED:
            cost = find_decision_cost(contrast.with_noise_quantiles(), lambda seeds: goal)
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
            return goal_after(total).compute_power(contrast.with_seeds(total), truth) >= POWER

        return _find_smallest(decides, MAX_SEEDS)

    if contrast.images < 2:
        return DecisionCost()
    truth, goal, total = float(contrast.mean), goal_after(contrast.seeds), contrast.images
    seeds = find_fewest_seeds(contrast) if contrast.seeds > 1 else None
    images = _find_smallest(
        lambda more: goal.compute_power(contrast.with_images(total + more), truth) >= POWER, MAX_IMAGES
    )
    if seeds or images or contrast.seeds < 2:
        return DecisionCost(seeds, images)
    while (total := 2 * total) <= MAX_IMAGES:
        if more := find_fewest_seeds(contrast.with_images(total)):
            return DecisionCost(both=(more, total - contrast.images))
    return DecisionCost()


def _judge(contrast: PairedContrast, margin: float, lower_is_better: bool, p: float, p_beyond: float) -> VerdictKind:
    if p_beyond <= VERDICT_LEVEL and abs(contrast.mean) + contrast.compute_half_width() <= margin:
        return VerdictKind.EQUIVALENT
    if p > VERDICT_LEVEL:
        return VerdictKind.UNDECIDED
    return VerdictKind.BETTER if (contrast.mean > 0) != lower_is_better else VerdictKind.WORSE


def _compute_p_beyond(contrast: PairedContrast, margin: float) -> float:
    """Return the one-sided p-value of a difference of `margin` or more in either direction."""
    if abs(contrast.mean) > margin:
        return 1.0
    return float(max(contrast.compute_p_value(margin), contrast.compute_p_value(-margin))) / 2


def _find_smallest(decides: Callable[[int], bool], maximum: int) -> int | None:
    """Return the smallest number up to `maximum` that decides, by bisection; None if no number decides."""
    if not decides(maximum):
        return None
    low, high = 0, maximum
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Look:
    """One look at a comparison (interim analysis).

    Attributes:
        seeds: number of seeds of both sides.
        budget: number of seeds that the budget allowed at this look.
        level: level of the interval (1 − its confidence).
        spent: probability of an error at this look or an earlier one.
    """

    seeds: int
    budget: int
    level: float
    spent: float


# A report with several of the same seeds, made before the first look. Its intervals may be shorter, because it pools
# the noise of its experiments, so it is not known whether it left the comparison undecided. It only spends its level.
REPORT_LOOK = Look(0, 0, MIN_LEVEL, VERDICT_LEVEL)


def compute_next_look(earlier_looks: Sequence[Look], seeds: int, budget: int, is_last: bool = False) -> Look:
    """Return the look after the earlier looks, which spends its part of the error probability.

    Args:
        earlier_looks: all looks taken, with rising numbers of seeds.
        seeds: number of seeds at this look.
        budget: largest number of seeds.
        is_last: whether this is the last look, although the budget allows more seeds (for example, because its hours
            are spent).
    """
    spent = _compute_spent(earlier_looks, seeds, budget, is_last)
    return compute_further_looks(earlier_looks, [(seeds, spent)], budget)[-1]


def plan_looks(earlier_looks: Sequence[Look], budget: int, paths: int = RANDOM_PATHS) -> list[Look]:
    """Return all looks after the earlier looks, one after each seed up to the budget."""
    minimum = max([MIN_SEEDS, *(look.seeds + 1 for look in earlier_looks)])
    plan = [(seeds, _compute_spent(earlier_looks, seeds, budget)) for seeds in range(minimum, budget + 1)]
    return compute_further_looks(earlier_looks, plan, budget, paths)


def _compute_spent(earlier_looks: Sequence[Look], seeds: int, budget: int, is_last: bool = False) -> float:
    """Return the error probability that is spent after a number of seeds."""
    start_look = Look(0, 0, 1.0, 0.0)
    for look in earlier_looks:
        # If the hours end first, the budget counts as spent. A later run with more hours starts a new budget with the
        # same number of seeds.
        if look.budget != budget or look.spent > _compute_spent_at_end(start_look) - 1e-9:
            start_look = look
    share = 1.0 if is_last else min(1.0, (seeds - start_look.seeds) / max(1, budget - start_look.seeds))
    spent_before = earlier_looks[-1].spent if earlier_looks else 0.0
    return max(
        spent_before,
        start_look.spent + (_compute_spent_at_end(start_look) - start_look.spent) * share**SPENDING_EXPONENT,
    )


def _compute_spent_at_end(look: Look) -> float:
    """Return the error probability that is spent at the end of the budget after a look."""
    return look.spent + SPENT_SHARE * (LEVEL - look.spent)


def compute_further_looks(
    earlier_looks: Sequence[Look], plan: Sequence[tuple[int, float]], budget: int, paths: int = RANDOM_PATHS
) -> list[Look]:
    """Return the looks of a plan with the levels at which they spend their error probabilities.

    Args:
        earlier_looks: all looks taken.
        plan: number of seeds of each further look, and the error probability that is spent after it.
        budget: largest number of seeds.
        paths: number of drawn comparisons without a difference.
    """
    rng = np.random.default_rng(0)
    levels, planned_spending = {look.seeds: look.level for look in earlier_looks}, dict(plan)  # by number of seeds
    spent = earlier_looks[-1].spent if earlier_looks else 0.0
    inside, mean, squares = np.ones(paths, dtype=bool), np.zeros(paths), np.zeros(paths)
    looks = []
    for number in range(1, max(planned_spending) + 1):
        step = rng.standard_normal(paths) - mean
        mean += step / number
        squares += step**2 * (number - 1) / number  # Welford (1962)
        if number not in levels and number not in planned_spending:
            continue
        statistics = np.abs(mean) * np.sqrt(number * (number - 1) / squares)
        if number in planned_spending:
            errors = round((planned_spending[number] - spent) * paths)
            threshold = np.partition(statistics[inside], -errors)[-errors] if errors else np.inf
            levels[number] = float(max(MIN_LEVEL, 2 * stdtr(number - 1, -threshold)))
            spent = planned_spending[number]
            looks.append(Look(number, budget, levels[number], spent))
        inside &= statistics < compute_student_quantile(number - 1, levels[number])
    return looks


def compute_verdict(
    contrast: PairedContrast, level: float, margin: float, lower_is_better: bool = False
) -> VerdictKind:
    """Return the verdict that the interval at `level` allows."""
    return VerdictKind(str(compute_verdicts(contrast, level, margin, lower_is_better)))


def compute_verdicts(
    contrast: PairedContrast, level: float, margin: float, lower_is_better: bool = False
) -> np.ndarray:
    """Return the verdicts on an array of contrasts, as strings of `VerdictKind`, in the shape of the array."""
    half_width, mean = contrast.compute_half_width(level), contrast.mean
    positive, negative = VerdictKind.BETTER, VerdictKind.WORSE
    if lower_is_better:
        positive, negative = negative, positive
    if level < contrast.smallest_p_value:  # there are too few images for a verdict on equal differences
        half_width = np.where(contrast.varies, half_width, np.inf)
    cases = [np.abs(mean) + half_width <= margin, mean - half_width > 0, mean + half_width < 0]
    choices = [VerdictKind.EQUIVALENT.value, positive.value, negative.value]
    return np.select(cases, choices, VerdictKind.UNDECIDED.value)


def find_deciding_budget(contrast: PairedContrast, margin: float) -> int | None:
    """Return the smallest seed budget at which a new `decide` run reaches a verdict with probability `POWER`.

    It exceeds the number of seeds that a single look needs, because the page of the contrast is an earlier look.
    Earlier looks of the run may decide, too, but only the last one is counted, so the true probability is slightly
    larger.

    Args:
        contrast: a difference over several seeds. If its noise is pooled with other experiments, the additional degrees
            of freedom are not used, because a `decide` run has no other experiments.
        margin: smallest difference that matters.
    """
    unpooled_contrast = replace(contrast.with_noise_quantiles(), seed_df=np.asarray(contrast.seeds - 1.0))

    @cache
    def goal_after(seeds: int) -> DecisionGoal:
        level = plan_looks([REPORT_LOOK], seeds, PATHS_OF_COST)[-1].level
        return DecisionGoal(margin, level, level)

    more = find_decision_cost(unpooled_contrast, goal_after).seeds
    if more is None:
        return None
    return contrast.seeds + more


def find_cost_after_looks(contrast: PairedContrast, looks: Sequence[Look], margin: float) -> DecisionCost:
    """Return the cost of a decision after undecided looks: a larger budget, or a new decision on more images."""

    @cache
    def goal_after(seeds: int) -> DecisionGoal:
        last = plan_looks(looks, seeds, PATHS_OF_COST)[-1] if seeds > looks[-1].seeds else looks[-1]
        return DecisionGoal(margin, last.level, last.level)

    return find_decision_cost(contrast.with_noise_quantiles(), goal_after)
