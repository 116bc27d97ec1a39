"""Contents of the files of `snakemake decide`: one for each look (interim analysis), and the decision."""

from typing import Literal

from dj2mgm.settings.base import Section, Seed, setting
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.verdict_kinds import VerdictKind


class LookRecord(Section):
    """A look, the interim analysis of both sides after some seeds: look.yaml."""

    experiment: str = setting()
    against: str = setting("baseline", "experiment that it is compared with")
    seeds: list[Seed] = setting()
    kind: Literal["better", "worse", "equivalent", "undecided", "withheld"] = setting()
    mean: float = setting(..., "difference of the headline from `against`")
    half: float = setting(..., "half the length of the interval")
    level: float = setting(..., "1 − the confidence of the interval")
    spent: float = setting(..., "probability of an error at this look or an earlier one")
    reported: bool = setting(False, "a report with several of the seeds was made before the first look")
    budget: DecisionBudget = setting(..., "the budget when the look was taken")
    most_seeds: int = setting(..., "seeds that this budget allowed")
    seconds: float | None = setting(..., "measured time of all seeds of both sides")
    seconds_per_seed: float | None = setting()
    title: str = setting(..., "name of the headline")
    difference: str = setting(..., "`mean` with its unit")
    interval: str = setting(..., "ends of the interval; empty if it contains all possible differences")
    statement: str = setting(..., "the verdict as the end of a sentence")
    next_step: str = setting(..., "the price of a decision or, without a verdict, the remedy; empty if it is decided")
    command: str = setting(..., "the command that continues; empty if there is none")

    @property
    def verdict(self) -> VerdictKind:
        return VerdictKind(self.kind)


def count_affordable_seeds(
    budget: DecisionBudget, finished_seeds: int, seconds: float | None, seconds_per_seed: float | None
) -> int:
    """Return the number of seeds of each side that a budget allows, at least `finished_seeds`.

    Args:
        finished_seeds: finished seeds.
        seconds: their time.
        seconds_per_seed: the time of one more; None if it is not known, so that `budget.hours` does not limit yet.
    """
    allowed_seeds = budget.seeds
    if budget.hours is not None and seconds is not None and seconds_per_seed:
        allowed_seeds = min(
            allowed_seeds, finished_seeds + int(max(0.0, 3600 * budget.hours - seconds) // seconds_per_seed)
        )
    return max(finished_seeds, allowed_seeds)


def count_planned_seeds(
    budget: DecisionBudget,
    last: LookRecord | None,
    finished_seeds: int,
    seconds: float | None,
    seconds_per_seed: float | None,
) -> int:
    """Return the number of seeds that looks under a budget are planned for.

    It is fixed at the first of these looks, even if seeds take less time later, because all intervals depend on it.
    """
    if last and last.budget == budget:
        return last.most_seeds
    return count_affordable_seeds(budget, finished_seeds, seconds, seconds_per_seed)


def needs_another_seed(look: LookRecord, budget: DecisionBudget) -> bool:
    """Return whether another seed follows a look."""
    finished_seeds = len(look.seeds)
    spent = finished_seeds, look.seconds, look.seconds_per_seed
    allowed_seeds = min(count_planned_seeds(budget, look, *spent), count_affordable_seeds(budget, *spent))
    was_last = min(look.most_seeds, count_affordable_seeds(look.budget, *spent)) <= finished_seeds
    # at the end of a budget, a verdict may be withheld because more seeds are needed to show that images are used
    is_open = look.verdict == VerdictKind.UNDECIDED or (look.verdict == VerdictKind.WITHHELD and was_last)
    return is_open and allowed_seeds > finished_seeds
