"""The verdict on the best of many candidates is rarely wrong on new seeds.

Each simulated search uses the same storage as a real one. Its scores come from a simple model with noise per run and
per image of a run.
"""

import numpy as np
import pytest

from dj2mgm.evaluation.contrasts import contrast_with_reference
from dj2mgm.evaluation.paired_values import PairedValues
from dj2mgm.evaluation.sequential import Look, compute_verdict, plan_looks
from dj2mgm.runs.studies.trials import Trials
from dj2mgm.settings.study_files import Interval
from simulated_search import settings

CANDIDATES, IMAGES, SEEDS, SEARCHES = 20, 60, 6, 60
SEED_NOISE, IMAGE_NOISE = 0.02, 0.1  # noise of a run's level, and of its images
AXES = {"x": Interval(low=0.0, high=1.0)}


def draw_runs(rng: np.random.Generator, runs: int) -> np.ndarray:
    """Draw the scores of runs on each image (runs, IMAGES)."""
    levels = SEED_NOISE * rng.standard_normal((runs, 1))
    return levels + IMAGE_NOISE * rng.standard_normal((runs, IMAGES))


def search(rng: np.random.Generator, storage: str) -> np.ndarray:
    """Search among identical candidates; return the scores of the best one's run (1, IMAGES)."""
    trials = Trials(settings("", storage, axes=AXES, sampler="random"), "me", CANDIDATES)
    candidates = trials.ask(1, CANDIDATES)
    runs = dict(zip((trial.name for trial in candidates), draw_runs(rng, CANDIDATES), strict=True))
    trials.tell({name: float(run.mean()) for name, run in runs.items()})
    best = trials.study.best_trial
    return runs[best.user_attrs["run"]["name"]][None]


def verdict(winner: np.ndarray, baseline: np.ndarray, looks: list[Look]) -> str:
    """Return the verdict after looks at each seed."""
    for look in looks:
        values = (winner - baseline)[: look.seeds]
        [contrast] = contrast_with_reference([PairedValues(tuple(range(look.seeds)), values, np.ones(IMAGES))])
        if (kind := compute_verdict(contrast, look.level, 0.0)) != "undecided":
            return kind
    return "undecided"


@pytest.mark.slow
def test_identical_candidates_are_rarely_judged_better():
    rng, looks, kinds, chosen = np.random.default_rng(0), plan_looks([], SEEDS), [], []
    for _ in range(SEARCHES):
        chosen.append(float(search(rng, "sqlite://").mean()))
        kinds.append(verdict(draw_runs(rng, SEEDS), draw_runs(rng, SEEDS), looks))
    assert np.mean(chosen) > 1.5 * SEED_NOISE, "the score that a variant is chosen by is too high"
    assert kinds.count("better") / SEARCHES <= 0.05
