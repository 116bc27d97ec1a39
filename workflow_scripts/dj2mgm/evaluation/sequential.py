"""Verdicts on a comparison after each seed, with an error rate that holds for all looks together.

A 95 % interval that is looked at ten times misses the true difference more often than in 5 of 100 cases. Repeated
confidence intervals (Jennison and Turnbull 1989, JRSS B 51, 305) are longer at early looks, so that all of them
together contain it with a probability of 95 %. A verdict that follows from any of them is therefore right with this
probability, whether it is better, worse or equivalent.

The level of each look follows from alpha spending (Lan and DeMets 1983, Biometrika 70, 659): after a share t of the
budget's seeds, the probability of an error is `SPENT_SHARE` · 5 % · t^`EXPONENT` at most (Kim and DeMets 1987). The
rest is kept for a larger budget, which spends the same share of it.

A mean over k seeds is truth + noise of the images + noise of the seeds. The images are the same at all looks, so means
after j < k seeds have a correlation of sqrt(j / k) without image noise, and a larger one with it. Levels are computed
for the least favorable case, no image noise: then the looks are Student's t statistics of the first k of n normal
numbers. Levels for known variances would permit errors in up to 7 instead of 5 of 100 cases, because the variance
of two or three seeds is small by chance (compare Jennison and Turnbull 1991, Biometrika 78, 133, who integrate this
process). Here it is drawn `RANDOM_PATHS` times, which gives the spent probability with a standard error of 0.05 points.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.special import stdtr

from dj2mgm.evaluation.contrasts import DecisionCost, Goal, PairedContrast, find_decision_cost
from dj2mgm.evaluation.intervals import LEVEL, student_quantile
from dj2mgm.records.look_records import MIN_SEEDS

SPENT_SHARE = 0.9  # share of the remaining error probability that a budget spends
EXPONENT = 2.0
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


def next_look(earlier: Sequence[Look], seeds: int, budget: int, last: bool = False) -> Look:
    """Return the look after `earlier` ones, which spends its part of the error probability.

    Args:
        earlier: all looks taken, with rising numbers of seeds.
        seeds: their number at this look.
        budget: largest number of seeds.
        last: whether this is the last look, although the budget allows more seeds (for example, because its hours are
            spent).
    """
    return further_looks(earlier, [(seeds, _spent(earlier, seeds, budget, last))], budget)[-1]


def plan_looks(earlier: Sequence[Look], budget: int, paths: int = RANDOM_PATHS) -> list[Look]:
    """Return all looks after `earlier` ones, one after each seed up to the budget."""
    minimum = earlier[-1].seeds + 1 if earlier else MIN_SEEDS
    planned = [(seeds, _spent(earlier, seeds, budget)) for seeds in range(minimum, budget + 1)]
    return further_looks(earlier, planned, budget, paths)


def _spent(earlier: Sequence[Look], seeds: int, budget: int, last: bool = False) -> float:
    """Return the error probability that is spent after a number of seeds."""
    start_look = Look(0, 0, 1.0, 0.0)
    for look in earlier:
        # a budget is also spent if its hours end before its seeds; more hours are then another budget of as many seeds
        if look.budget != budget or look.spent > _spent_by_budget(start_look) - 1e-9:
            start_look = look
    share = 1.0 if last else min(1.0, (seeds - start_look.seeds) / max(1, budget - start_look.seeds))
    before = earlier[-1].spent if earlier else 0.0
    return max(before, start_look.spent + (_spent_by_budget(start_look) - start_look.spent) * share**EXPONENT)


def _spent_by_budget(look: Look) -> float:
    """Return the error probability that is spent at the end of the budget after a look."""
    return look.spent + SPENT_SHARE * (LEVEL - look.spent)


def further_looks(
    earlier: Sequence[Look], planned: Sequence[tuple[int, float]], budget: int, paths: int = RANDOM_PATHS
) -> list[Look]:
    """Return planned looks with the levels at which they spend their error probabilities.

    Args:
        earlier: all looks taken.
        planned: number of seeds of each further look, and the error probability that is spent after it.
        budget: largest number of seeds.
        paths: number of drawn comparisons without a difference.
    """
    rng = np.random.default_rng(0)
    taken, spending = {look.seeds: look.level for look in earlier}, dict(planned)
    spent = earlier[-1].spent if earlier else 0.0
    inside, mean, squared = np.ones(paths, dtype=bool), np.zeros(paths), np.zeros(paths)
    looks = []
    for number in range(1, max(spending) + 1):
        step = rng.standard_normal(paths) - mean
        mean += step / number
        squared += step**2 * (number - 1) / number  # Welford (1962)
        if number not in taken and number not in spending:
            continue
        statistic = np.abs(mean) * np.sqrt(number * (number - 1) / squared)
        if number in spending:
            errors = round((spending[number] - spent) * paths)
            left = statistic[inside]
            reached = np.partition(left, -errors)[-errors] if errors else np.inf
            taken[number] = float(max(MIN_LEVEL, 2 * stdtr(number - 1, -reached)))
            spent = spending[number]
            looks.append(Look(number, budget, taken[number], spent))
        inside &= statistic < student_quantile(number - 1, taken[number])
    return looks


def verdict_at(contrast: PairedContrast, level: float, margin: float, lower_is_better: bool = False) -> np.ndarray:
    """Return the verdict that the interval at `level` allows, as an array of strings with the shape of the contrast."""
    half, mean = contrast.half(level), contrast.mean
    positive, negative = ("worse", "better") if lower_is_better else ("better", "worse")
    if level < contrast.smallest_p_value:  # equal differences of so few images decide nothing
        half = np.where(contrast.varies, half, np.inf)
    cases = [np.abs(mean) + half <= margin, mean - half > 0, mean + half < 0]
    return np.select(cases, ["equivalent", positive, negative], "undecided")


def smallest_budget_that_decides(contrast: PairedContrast, margin: float) -> int | None:
    """Return the smallest budget of seeds with which a new decision decides with probability `POWER`.

    It exceeds the number of seeds that a single look needs. Earlier looks may decide, too, but only the last one is
    counted, so the true probability is somewhat larger.

    Args:
        contrast: a difference over several seeds. If its noise is pooled with other experiments, the additional degrees
            of freedom are not used, because a decision has none.
        margin: smallest difference that matters.
    """
    unpooled_contrast = replace(contrast, seed_freedom=np.asarray(contrast.seeds - 1.0))

    @cache
    def goal_after(seeds: int) -> Goal:
        level = plan_looks([], seeds, PATHS_OF_COST)[-1].level
        return Goal(margin, level, level)

    more = find_decision_cost(unpooled_contrast, goal_after).seeds
    return more and contrast.seeds + more


def cost_after_looks(contrast: PairedContrast, looks: Sequence[Look], margin: float) -> DecisionCost:
    """Return the cost of a decision after undecided looks: a larger budget, or a new decision on more images."""

    @cache
    def goal_after(seeds: int) -> Goal:
        last = plan_looks(looks, seeds, PATHS_OF_COST)[-1] if seeds > looks[-1].seeds else looks[-1]
        return Goal(margin, last.level, last.level)

    return find_decision_cost(contrast, goal_after)
