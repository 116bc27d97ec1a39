"""The verdict on the best of many candidates is rarely wrong on new seeds.

Scores of simulated searches come from a simple model with noise per run and per image of a run.
"""

import numpy as np
import pytest

from dj2mgm.evaluation.contrast_verdicts import Look, compute_verdict, plan_looks
from dj2mgm.evaluation.contrasts import PairedValues, contrast_with_reference
from dj2mgm.features.studies.axes import Interval
from dj2mgm.features.studies.trials import propose_trials
from simulated_search import settings

CANDIDATES, IMAGES, SEEDS, SEARCHES = 20, 60, 6, 60
SEED_NOISE, IMAGE_NOISE = 0.02, 0.1  # noise of a run's level, and of its images
AXES = {"x": Interval(low=0.0, high=1.0)}


def draw_runs(rng: np.random.Generator, runs: int) -> np.ndarray:
    """Draw the scores of runs on each image (runs, IMAGES)."""
    levels = SEED_NOISE * rng.standard_normal((runs, 1))
    return levels + IMAGE_NOISE * rng.standard_normal((runs, IMAGES))


def search(rng: np.random.Generator) -> np.ndarray:
    """Search among identical candidates; return the scores of the best one's run (1, IMAGES)."""
    candidates = propose_trials(settings("", axes=AXES, sampler="random"), [], 1, CANDIDATES)
    runs = draw_runs(rng, len(candidates))
    return runs[runs.mean(1).argmax()][None]


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
        chosen.append(float(search(rng).mean()))
        kinds.append(verdict(draw_runs(rng, SEEDS), draw_runs(rng, SEEDS), looks))
    assert np.mean(chosen) > 1.5 * SEED_NOISE, "the score that a variant is chosen by is too high"
    assert kinds.count("better") / SEARCHES <= 0.05
