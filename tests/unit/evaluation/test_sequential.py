"""Looks after each seed, in simulated comparisons and compared with published boundaries."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from dj2mgm.evaluation.contrast_verdicts import (
    REPORT_LOOK,
    VERDICT_LEVEL,
    Look,
    compute_further_looks,
    compute_next_look,
    compute_verdict,
    compute_verdicts,
    find_cost_after_looks,
    find_deciding_budget,
    find_decision_cost,
    plan_looks,
)
from dj2mgm.evaluation.contrasts import DecisionGoal, PairedContrast, PairedValues, contrast_with_reference
from dj2mgm.evaluation.intervals import LEVEL
from median_estimates import draw_median

IMAGES = 20
DOMINATED = {"images": 0.25, "both": 1.0, "seeds": 10.0}  # standard deviation of a seed relative to that of the images


def differences(rng: np.random.Generator, studies: int, seeds: int, ratio: float, truth: float) -> np.ndarray:
    """Draw differences (studies, seeds, IMAGES) whose means over images have a standard deviation of 1."""
    images = np.sqrt(IMAGES) * rng.standard_normal((studies, 1, IMAGES))
    return truth + images + ratio * rng.standard_normal((studies, seeds, 1))


def make_contrast(values: np.ndarray, seeds: int) -> PairedContrast:
    [contrast] = contrast_with_reference([PairedValues(tuple(range(seeds)), values[:, :seeds], np.ones(IMAGES))])
    return contrast


@dataclass(frozen=True)
class Decisions:
    """Verdicts and numbers of seeds of simulated decisions, (studies,) each."""

    kinds: np.ndarray
    seeds: np.ndarray

    def share(self, *kinds: str) -> float:
        return float(np.isin(self.kinds, kinds).mean())


def decide(values: np.ndarray, looks: list[Look], margin: float = 0.0) -> Decisions:
    kinds = np.full(len(values), "undecided", dtype="<U10")
    seeds = np.full(len(values), looks[-1].seeds)
    for look in looks:
        verdicts = compute_verdicts(make_contrast(values, look.seeds), look.level, margin)
        decided = (kinds == "undecided") & (verdicts != "undecided")
        kinds[decided], seeds[decided] = verdicts[decided], look.seeds
    return Decisions(kinds, seeds)


@pytest.fixture(scope="module")
def ten_looks() -> list[Look]:
    return plan_looks([], 11)


@pytest.mark.parametrize("dominated", DOMINATED)
def test_ten_looks_rarely_find_a_difference_by_chance(ten_looks, dominated):
    rng = np.random.default_rng(1)
    values = differences(rng, 6000, 11, DOMINATED[dominated], truth=0.0)
    assert decide(values, ten_looks).share("better", "worse") <= 0.05


@pytest.mark.parametrize("dominated", DOMINATED)
def test_a_difference_of_the_margin_is_rarely_equivalent(ten_looks, dominated):
    rng = np.random.default_rng(2)
    margin = 3.0 + DOMINATED[dominated]
    for truth in (margin, -margin):
        values = differences(rng, 3000, 11, DOMINATED[dominated], truth)
        wrong = "worse" if truth > 0 else "better"
        assert decide(values, ten_looks, margin).share("equivalent", wrong) <= 0.05


def test_a_larger_budget_after_an_undecided_one_keeps_the_error(ten_looks):
    first = plan_looks([], 6)
    looks = first + plan_looks(first, 12)
    assert looks[-1].spent == pytest.approx(0.05 * (1 - 0.1**2)) and first[-1].spent == pytest.approx(0.05 * 0.9)
    values = differences(np.random.default_rng(3), 6000, 12, DOMINATED["seeds"], truth=0.0)
    assert decide(values, first).share("better", "worse") < decide(values, looks).share("better", "worse") <= 0.05


def fixed_power(ratio: float, seeds: int, truth: float, rng: np.random.Generator) -> float:
    contrast = make_contrast(differences(rng, 4000, seeds, ratio, truth), seeds)
    return float(np.mean(contrast.mean - contrast.compute_half_width() > 0))


def find_truth(ratio: float, seeds: int) -> float:
    """Return the true difference that a fixed number of seeds shows with 80 % power, by bisection of simulations."""
    low, high = 0.0, 20.0 * max(1.0, ratio)
    for _ in range(20):
        middle = (low + high) / 2
        small = fixed_power(ratio, seeds, middle, np.random.default_rng(4)) < 0.8
        low, high = (middle, high) if small else (low, middle)
    return high


@pytest.mark.parametrize(
    ("dominated", "most_seeds", "least_power"), [("images", 0.72, 0.66), ("both", 0.78, 0.66), ("seeds", 0.86, 0.66)]
)
def test_looks_save_seeds(dominated, most_seeds, least_power):
    """Compare with ten seeds without looks, at the difference that they show with 80 % power."""
    ratio = DOMINATED[dominated]
    truth = find_truth(ratio, 10)
    decisions = decide(differences(np.random.default_rng(5), 3000, 10, ratio, truth), plan_looks([], 10))
    assert decisions.seeds.mean() <= most_seeds * 10
    assert decisions.share("better") >= least_power and decisions.share("worse") < 0.001


def test_levels_of_many_seeds_equal_published_boundaries():
    """Compare five looks with Pocock-type spending with z values of Lan and DeMets' program for known variances."""
    planned = [(40 * number, 0.05 * np.log(1 + (np.e - 1) * number / 5)) for number in range(1, 6)]
    looks = compute_further_looks([], planned, 200)
    quantiles = [stats.norm.isf(look.level / 2) for look in looks]
    assert quantiles == pytest.approx([2.438, 2.427, 2.410, 2.397, 2.386], abs=0.03)


def test_a_single_look_has_the_level_that_it_spends():
    for seeds, level in ((2, 0.05), (4, 0.03)):
        assert compute_further_looks([], [(seeds, level)], seeds)[0].level == pytest.approx(level, rel=0.03)


def test_spending_rises_to_its_share_and_is_deterministic(ten_looks):
    spent = [look.spent for look in ten_looks]
    assert spent == sorted(spent) and spent[-1] == pytest.approx(0.045)
    assert compute_next_look(ten_looks[:5], 7, 11) == ten_looks[5], "a resumed decision has the same intervals"
    assert compute_next_look(ten_looks[:3], 5, 11, is_last=True).spent == pytest.approx(0.045)


def test_additional_hours_can_lead_to_a_decision(ten_looks):
    early = [*ten_looks[:3], compute_next_look(ten_looks[:3], 5, 11, is_last=True)]
    later = plan_looks(early, 11)
    assert later[-1].spent == pytest.approx(0.05 * (1 - 0.1**2)) and min(look.level for look in later) > 1e-5
    values = differences(np.random.default_rng(5), 6000, 11, DOMINATED["seeds"], truth=0.0)
    assert decide(values, early + later).share("better", "worse") <= 0.05


def test_cost_of_a_larger_budget_decides_in_four_of_five():
    """Draw comparisons with the difference and noise that the cost assumes."""
    ratio, truth, looks = 6.0, 6.0, plan_looks([], 6)
    none = np.zeros(())
    typical = PairedContrast(
        none + truth, IMAGES, IMAGES, 6, none + 1.0, IMAGES - 1, none + ratio**2 / 6, none + 5.0, none > 0
    )
    assert compute_verdict(typical, looks[-1].level, 0.0) == "undecided"
    more = find_cost_after_looks(draw_median(typical), looks, 0.0).seeds
    longer = looks + plan_looks(looks, 6 + more)
    values = differences(np.random.default_rng(6), 4000, 6 + more, ratio, truth)
    open_after_six = decide(values, looks).kinds == "undecided"
    assert decide(values, longer).share("better") == pytest.approx(0.82, abs=0.05), more
    assert 0.2 < open_after_six.mean() < 0.95


def test_a_budget_for_a_new_decision_decides_in_four_of_five():
    """The noise of the three seeds is pooled with other experiments', which a decision does not use."""
    ratio, truth = 4.0, 7.0
    none = np.zeros(())
    typical = PairedContrast(
        none + truth, IMAGES, IMAGES, 3, none + 1.0, IMAGES - 1, none + ratio**2 / 3, none + 6.0, none > 0
    )
    at_once = 3 + find_decision_cost(typical, lambda seeds: DecisionGoal(0.0, LEVEL, LEVEL)).seeds
    budget = find_deciding_budget(draw_median(typical), 0.0)
    values = differences(np.random.default_rng(7), 4000, budget, ratio, truth)
    assert at_once < budget
    assert decide(values, plan_looks([], at_once)).share("better") < 0.78
    assert decide(values, plan_looks([REPORT_LOOK], budget)).share("better") == pytest.approx(0.82, abs=0.05)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("dominated", DOMINATED)
def test_a_report_counts_as_a_look(dominated, seeds):
    """The report and the decision together are wrong in at most 5 of 100 cases."""
    values = differences(np.random.default_rng(seeds), 6000, 10, DOMINATED[dominated], truth=0.0)
    wrong_report = make_contrast(values, seeds).compute_p_value() <= VERDICT_LEVEL
    looks = plan_looks([REPORT_LOOK], 10)
    assert looks[-1].spent == pytest.approx(0.05 * (1 - 0.1**2))
    wrong_decision = decide(values, looks).kinds != "undecided"
    assert np.mean(wrong_report | wrong_decision) <= 0.053, "noise of 6000 studies"
