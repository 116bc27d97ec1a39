"""Simulate searches with each sampler, on recipes whose scores are known and on mixtures of four sources.

    python benchmarks/search_samplers.py    # half an hour on one core; it trains nothing
    python benchmarks/search_samplers.py --samplers tpe --startup 10    # with ten random points, Optuna's default

`search_truth.csv` has the scores of all 24 recipes of search_truth.py, each trained once on a quarter of the rows and
once on all. As there, a search tries twelve recipes on a quarter of the rows, and trains the best three on all. A
mixture's score is minus its squared distance from a mixture that is drawn for each search, plus noise; 24 mixtures are
tried.
"""

import argparse
import csv
import json
from collections.abc import Callable
from functools import cache, partial
from statistics import mean

import numpy as np
from search_truth import DROPPED, PROJECT, RATE, REFERENCE, SPACE

from dj2mgm.features.studies.axes import MixtureSpace, build_share_axes
from dj2mgm.features.studies.study_records import SearchSettings
from dj2mgm.features.studies.trials import SAMPLERS, ScoredTrial, propose_trials

BATCH, TRIED, FINALISTS, MIXTURES = 4, 12, 3, 24
SOURCES = ["a", "b", "c", "d"]
NOISE = 0.05  # standard deviation of a mixture's score
Point = tuple[float, ...]


def search(
    sampler: str, seed: int, axes: dict, mixture: MixtureSpace | None, number: int, score: Callable[[Point], float]
) -> dict[Point, float]:
    """Return the scores of the points that a search tries."""
    settings = {"experiment": "baseline", "seeds": [0], "folder": "", "axes": axes, "mixture": mixture}
    space = SearchSettings.model_validate(settings | {"sampler": sampler, "seed": seed})
    tried: list[ScoredTrial] = []
    for batch in range(1, number // BATCH + 1):
        trials = propose_trials(space, tried, batch, BATCH)
        tried += [(trial, score(tuple(trial.changes.values()))) for trial in trials]
    return {tuple(trial.changes.values()): value for trial, value in tried}


@cache
def read_recipes() -> tuple[dict[Point, float], dict[Point, float]]:
    """Return the scores of each recipe after training on a quarter of the rows, and on all."""
    with open(PROJECT / "benchmarks/search_truth.csv", encoding="utf-8", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    points = [(row["junk"], row["poor"], row["lower_quantile"], row["learning_rate"]) for row in rows]
    quarter, full = ({point: row[key] for point, row in zip(points, rows, strict=True)} for key in ("quarter", "all"))
    return quarter, full


def find_recipe(sampler: str, seed: int) -> tuple[int, float]:
    """Return the rank of a search's winner among all recipes, and its share of the best gain over the baseline."""
    quarter, full = read_recipes()
    scores = search(sampler, seed, SPACE, None, TRIED, quarter.__getitem__)
    winner = max(sorted(scores, key=scores.__getitem__)[-FINALISTS:], key=full.__getitem__)
    ranking = sorted(full, key=full.__getitem__, reverse=True)
    baseline = full[tuple(REFERENCE[key] for key in ("sources.junk", "sources.poor", DROPPED, RATE))]
    return 1 + ranking.index(winner), (full[winner] - baseline) / (full[ranking[0]] - baseline)


def find_mixture(sampler: str, seed: int) -> float:
    """Return the squared distance of a search's best mixture from the truly best mixture."""
    random, mixture = np.random.default_rng(seed), MixtureSpace(sources=SOURCES)
    best_mixture = random.dirichlet(np.ones(len(SOURCES)))

    def distance(point: Point) -> float:
        return float(((np.array(point) - best_mixture) ** 2).sum())

    def score(point: Point) -> float:
        return -distance(point) + NOISE * random.normal()

    scores = search(sampler, seed, build_share_axes(mixture), mixture, MIXTURES, score)
    return distance(max(scores, key=scores.__getitem__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100, help="searches with each sampler (default: 100)")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=[*SAMPLERS])
    parser.add_argument("--startup", type=int, help="random points at the beginning (default: the workflow's)")
    arguments = parser.parse_args()
    for sampler in arguments.samplers:
        if arguments.startup is not None and sampler != "random":
            SAMPLERS[sampler] = partial(SAMPLERS[sampler], n_startup_trials=arguments.startup)
        winners = [find_recipe(sampler, seed) for seed in range(arguments.searches)]
        row = {"sampler": sampler, "best two of 24 recipes": mean(rank <= 2 for rank, _ in winners)}
        row |= {"mean share of the best gain": round(mean(gain for _, gain in winners), 4)}
        row |= {"at least 90 % of the best gain": mean(gain >= 0.9 for _, gain in winners)}
        distances = [find_mixture(sampler, seed) for seed in range(arguments.searches)]
        row |= {"mean squared distance of mixtures": round(mean(distances), 4)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
