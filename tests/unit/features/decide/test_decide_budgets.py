"""Budgets of a decision in seeds and hours."""

import pytest
import yaml

from dj2mgm.features.decide.looks import (
    LookRecord,
    count_affordable_seeds,
    count_planned_seeds,
    needs_another_seed,
)
from dj2mgm.runs.pages import format_hours
from dj2mgm.settings.targets import DecisionBudget

HOUR = 3600.0


def look(taken: int, budget: DecisionBudget, most: int, hours: float = 0.0, kind: str = "undecided") -> LookRecord:
    texts = dict.fromkeys(("title", "difference", "interval", "statement", "next_step", "command"), "")
    numbers = {"mean": 0.0, "half": 1.0, "level": 0.01, "spent": 0.01, "most_seeds": most}
    times = {"seconds": HOUR * hours, "seconds_per_seed": HOUR}
    seeds = list(range(taken))
    return LookRecord(experiment="other", seeds=seeds, kind=kind, budget=budget, **numbers, **times, **texts)


@pytest.mark.parametrize(
    ("hours", "taken", "used", "seconds_per_seed", "seeds"),
    [
        (None, 2, 9.0, 1.0, 10),  # only seeds are limited
        (6, 2, 2.0, 1.0, 6),
        (6.5, 2, 2.0, 1.0, 6),
        (1, 2, 2.0, 1.0, 2),  # finished seeds are kept
        (100, 2, 2.0, 1.0, 10),
        (6, 2, None, None, 10),  # no times are measured yet
    ],
)
def test_affordable_seeds(hours, taken, used, seconds_per_seed, seeds):
    budget = DecisionBudget(seeds=10, hours=hours)
    assert (
        count_affordable_seeds(budget, taken, used and HOUR * used, seconds_per_seed and HOUR * seconds_per_seed)
        == seeds
    )


def test_each_budget_keeps_its_own_plan():
    budget = DecisionBudget(seeds=10, hours=6)
    last = look(3, budget, most=6, hours=1.0)  # the seeds take less time than the first ones
    assert count_planned_seeds(budget, last, 4, 1.5 * HOUR, HOUR) == 6
    assert count_planned_seeds(DecisionBudget(seeds=8), last, 4, 1.5 * HOUR, HOUR) == 8


def test_a_decision_continues_while_open_and_affordable():
    budget = DecisionBudget(seeds=4)
    assert needs_another_seed(look(3, budget, most=4), budget)
    assert not needs_another_seed(look(4, budget, most=4), budget)
    assert needs_another_seed(look(4, budget, most=4), DecisionBudget(seeds=5)), "a larger budget"
    assert not needs_another_seed(look(3, budget, most=4, kind="better"), budget)
    assert not needs_another_seed(look(3, budget, most=4, kind="withheld"), budget)
    assert not needs_another_seed(look(4, budget, most=4, kind="withheld"), budget)
    assert needs_another_seed(look(4, budget, most=4, kind="withheld"), DecisionBudget(seeds=5)), (
        "withheld for lack of seeds"
    )
    assert not needs_another_seed(look(3, DecisionBudget(seeds=9), most=9, hours=3.5), DecisionBudget(seeds=9, hours=4))


@pytest.mark.parametrize(
    ("hours", "text"),
    [(0, "0"), (0.0121, "0.013"), (1.2, "1.2"), (9.96, "10.0"), (12.1, "13")],
)
def test_advised_hours_are_sufficient_and_valid_numbers(hours, text):
    assert format_hours(hours) == text
    assert DecisionBudget(hours=yaml.safe_load(text) or None).hours in (None, pytest.approx(hours, rel=0.1))
