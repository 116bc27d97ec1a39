"""Verdicts on the differences of a page, and the cost of deciding an undecided difference.

Holm (1979) corrects the p-values of a page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dj2mgm.evaluation.contrasts import POWER, DecisionGoal, PairedContrast
from dj2mgm.evaluation.intervals import LEVEL
from dj2mgm.verdict_kinds import VerdictKind

MAX_SEEDS, MAX_IMAGES = 100, 1_000_000  # no larger cost is reported
# Share of the remaining error probability that a page or a budget of `decide` spends. The rest is left to `decide`, or
# to a larger budget.
SPENT_SHARE = 0.9
VERDICT_LEVEL = SPENT_SHARE * LEVEL  # of the corrected p-values of a page


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
