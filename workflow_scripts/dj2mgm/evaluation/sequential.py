"""Verdicts on a comparison after each seed, with an error rate that holds for all looks together.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.special import stdtr

from dj2mgm.evaluation.contrast_verdicts import SPENT_SHARE, VERDICT_LEVEL, DecisionCost, find_decision_cost
from dj2mgm.evaluation.contrasts import DecisionGoal, PairedContrast
from dj2mgm.evaluation.intervals import LEVEL, compute_student_quantile
from dj2mgm.settings.targets import MIN_SEEDS
from dj2mgm.verdict_kinds import VerdictKind

SPENDING_EXPONENT = 2.0
RANDOM_PATHS, PATHS_OF_COST = 200_000, 20_000
MIN_LEVEL = 1e-15  # level of a look that decides nothing


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
