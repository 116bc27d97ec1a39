"""Successive halving: the next batch, budgets, and the error rate of searches whose best trial `decide` confirms.

Scores of simulated searches come from a simple model with noise per run and per image of a run.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dj2mgm.evaluation.contrast_verdicts import compute_verdict, plan_looks
from dj2mgm.evaluation.contrasts import PairedValues, contrast_with_reference
from dj2mgm.features.studies.designs import SearchDesign
from dj2mgm.features.studies.halving import (
    SearchHistory,
    compute_rung_sizes,
    compute_smallest_budget,
    plan_next,
)
from dj2mgm.features.studies.study_records import BatchRecord, BatchResult, TrialRecord
from dj2mgm.settings.targets import DecisionBudget
from simulated_search import settings as search_settings

IMAGES = 60
SEED_NOISE, IMAGE_NOISE = 0.02, 0.1  # noise of a run's level, and of its images


class Simulation:
    """Search with drawn results; `gains` are the true advantages of the first trials over the experiment."""

    def __init__(self, design: SearchDesign, seed: int, gains: tuple[float, ...] = (), seeds: tuple = (0,), fails=0.0):
        self.search = search_settings(Path(), seeds=list(seeds))
        self.rng, self.gains, self.fails = np.random.default_rng(seed), gains, fails
        self.trained: set[tuple[str, float, int]] = set()
        self.runs: dict[tuple, np.ndarray] = {}
        self.history = SearchHistory(design, self.search, BatchResult(scores={"base": 0.0}, runs=1, seconds=1.0), [])

    def finish(self, design: SearchDesign | None = None) -> SearchHistory:
        """Run the search to its end, with the same or another budget."""
        finished_batches = list(self.history.finished_batches)
        while True:
            self.history = SearchHistory(
                design or self.history.design, self.search, self.history.batch_0, finished_batches
            )
            if (record := plan_next(self.history)) is None:
                return self.history
            if record.step == "explore":
                number = sum(len(record.trials) for record, _ in self.history.explore_batches)
                trials = [TrialRecord(name=f"t{number + n}", changes={"x": n}) for n in range(len(record.trials))]
                record = record.model_copy(update={"trials": trials})
            finished_batches.append((record, self.measure(record)))

    def run(self, name: str, fraction: float, seed: int) -> np.ndarray:
        """Return a run's values by image; short runs have more noise."""
        if (name, fraction, seed) not in self.runs:
            index = int(name[1:]) if name[1:].isdigit() else len(self.gains)
            level = self.gains[index] if index < len(self.gains) else 0.0
            noise = SEED_NOISE / fraction**0.5 * self.rng.standard_normal()
            self.runs[name, fraction, seed] = level + noise + IMAGE_NOISE * self.rng.standard_normal(IMAGES)
        return self.runs[name, fraction, seed]

    def measure(self, record: BatchRecord) -> BatchResult:
        new = {(name, record.fraction, seed) for name in record.names for seed in record.seeds}
        assert not new & self.trained, "nothing is trained twice"
        self.trained |= new
        values = {
            trial.name: np.stack([self.run(trial.name, record.fraction, seed) for seed in record.seeds])
            for trial in record.trials
        }
        failed = {name for name in values if self.rng.random() < self.fails}
        scores = {name: None if name in failed else float(image_values.mean()) for name, image_values in values.items()}
        return BatchResult(scores=scores, runs=len(new), seconds=len(new) * record.fraction)

    def decide(self) -> dict[str, str]:
        """Return the verdicts of `snakemake decide` on the best trial, on seeds after those of the search."""
        winner, *others = self.history.rank_trials(-1)
        return {opponent: self.decide_pair(winner, opponent) for opponent in ("base", *others[:1], "random")}

    def decide_pair(self, winner: str, opponent: str) -> str:
        first, looks = max(self.search.seeds) + 1, planned_looks(DecisionBudget().seeds)
        for look in looks:
            seeds = range(first, first + look.seeds)
            own, others = (np.stack([self.run(name, 1.0, seed) for seed in seeds]) for name in (winner, opponent))
            [contrast] = contrast_with_reference([PairedValues(tuple(seeds), own - others, np.ones(IMAGES))])
            if (verdict := compute_verdict(contrast, look.level, 0.0).value) != "undecided":
                return verdict
        return "undecided"


LOOKS: dict[int, list] = {}


def planned_looks(most: int) -> list:
    return LOOKS.setdefault(most, plan_looks([], most, 20_000))


RUNGS = st.sampled_from([[1.0], [0.5, 1.0], [0.125, 0.5, 1.0], [0.1, 0.3, 0.9, 1.0]])
DESIGNS = st.builds(
    SearchDesign,
    trainings=st.integers(1, 60),
    batch=st.integers(1, 8),
    rungs=RUNGS,
    keep=st.sampled_from([0.1, 0.25, 1 / 3, 0.5]),
    gpu_hours=st.none() | st.integers(1, 60).map(lambda seconds: seconds / 3600),
)


@given(DESIGNS, st.integers(0, 99), st.sampled_from([(0,), (3, 1)]), st.sampled_from([0.0, 0.1]))
@settings(max_examples=60, deadline=None)
def test_a_search_keeps_its_budget_and_repeats_no_training(design, number, seeds, fails):
    assume(compute_smallest_budget(design) <= design.trainings)
    simulation = Simulation(design, number, seeds=seeds, fails=fails)
    history = simulation.finish()
    assert history.trainings <= design.trainings + 1e-9
    cost = sum(fraction for _, fraction, _ in simulation.trained) / len(seeds)
    assert cost == pytest.approx(history.trainings), "each run counts once"
    for rung in range(1, len(design.rungs)):
        before, own = history.collect_scores(rung - 1), history.collect_scores(rung)
        assert own.keys() <= before.keys()
        if not fails and own:
            left_out = [before[name] for name in before if name not in own]
            assert min(before[name] for name in own) >= max(left_out, default=-np.inf), "the best go on"


@given(DESIGNS, st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_budget_that_covers_one_variant_reaches_every_rung(design, number):
    assume(design.gpu_hours is None and compute_smallest_budget(design) <= design.trainings)
    history = Simulation(design, number).finish()
    sizes = [len(history.collect_scores(rung)) for rung in range(len(design.rungs))]
    assert sizes == compute_rung_sizes(design, sizes[0]) and sizes[0] >= 1


@given(DESIGNS, st.integers(1, 30), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_larger_budget_continues_without_repeating_a_run(design, more, number):
    assume(design.gpu_hours is None and compute_smallest_budget(design) <= design.trainings)
    simulation = Simulation(design, number)
    first = simulation.finish()
    larger = design.model_copy(update={"trainings": design.trainings + more})
    second = simulation.finish(larger)
    assert second.finished_batches[: len(first.finished_batches)] == first.finished_batches
    assert second.trainings <= larger.trainings + 1e-9


def test_the_number_of_trials_follows_from_the_budget():
    """Count by hand: 16 / 8 + 4 / 2 + 1 in the rungs are 5."""
    design = SearchDesign(trainings=5, batch=4, rungs=[0.125, 0.5, 1.0], keep=0.25)
    history = Simulation(design, 1).finish()
    assert [len(history.collect_scores(rung)) for rung in range(3)] == [16, 4, 1]
    assert [record.step for record, _ in history.finished_batches] == ["explore"] * 4 + ["promote"] * 2
    fewer = Simulation(design.model_copy(update={"trainings": 4}), 1).finish()
    assert len(fewer.collect_scores(0)) < 16


def test_measured_prices_of_short_runs_limit_hours():
    """A short run takes half as long as a complete one instead of an eighth, as the first batch shows."""
    design = SearchDesign(trainings=100, batch=2, rungs=[0.125, 1.0], keep=0.5, gpu_hours=6 / 3600)
    simulation = Simulation(design, 0)
    simulation.measure = lambda record: BatchResult(
        scores={trial.name: 0.0 for trial in record.trials},
        runs=len(record.names),
        seconds=len(record.names) * (0.5 if record.fraction < 1 else 1.0),
    )
    history = simulation.finish()
    assert len(history.collect_scores(0)) == 6 and len(history.collect_scores(1)) == 3 and history.seconds == 6.0


def test_only_training_is_cheaper_on_fewer_rows():
    """Complete runs of two seeds take 100 s, 40 s of them without training, so an eighth takes 20 + 30 / 8 s."""
    first = BatchResult(scores={"base": 0.0}, runs=2, seconds=100.0, fixed_seconds=40.0)
    history = SearchHistory(SearchDesign(), search_settings(Path(), seeds=[0, 1]), first, [])
    assert history.estimate_seconds(1) == 50 and history.estimate_seconds(0.125) == 20 + 30 / 8
    assert (
        SearchHistory(SearchDesign(), history.search, first.model_copy(update={"seconds": None}), []).estimate_seconds(
            0.5
        )
        is None
    )


DESIGN = SearchDesign(trainings=10, batch=20, rungs=[0.125, 0.5, 1.0], keep=0.25)


@pytest.mark.parametrize(
    ("design", "searches"),
    [
        (DESIGN, 40),
        pytest.param(DESIGN, 1000, marks=pytest.mark.slow),
        pytest.param(SearchDesign(trainings=20, batch=20, rungs=[1.0]), 300, marks=pytest.mark.slow),
    ],
)
def test_identical_candidates_are_rarely_judged_better(design, searches):
    verdicts = []
    for number in range(searches):
        simulation = Simulation(design, number)
        history = simulation.finish()
        assert len(history.collect_scores(0)) >= 20 and len(history.collect_scores(len(design.rungs) - 1)) >= 2
        verdicts.append(simulation.decide())
    better = sum(verdict["base"] == "better" for verdict in verdicts) / searches
    better_than_all = sum({*verdict.values()} == {"better"} for verdict in verdicts) / searches
    print(f"better than the baseline: {better:.1%}, than all three: {better_than_all:.1%}")
    assert better <= 0.05 and better_than_all <= 0.01


def test_a_planted_best_candidate_is_found_and_confirmed():
    winners, better = Counter(), 0
    for number in range(20):
        simulation = Simulation(DESIGN, number, gains=(0.0, 0.0, 0.02, 0.04, 0.15))
        winners[simulation.finish().rank_trials(-1)[0]] += 1
        better += {*simulation.decide().values()} == {"better"}
    assert winners["t4"] >= 18 and better >= 18
