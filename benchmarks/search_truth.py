"""Measure how well a search finds the best of 24 recipes, all of which are trained once as the truth.

    python benchmarks/search_truth.py FOLDER           # FOLDER: a clone of the project; hours on two cores
    python benchmarks/search_truth.py FOLDER --tiny    # four recipes and two searches, to try the script

The data are the same as in mixture.py: embedded scenes in four sources of different noise. A recipe states the amounts
of the two noisy sources, the share of rows that CLIP drops, and the learning rate of stage 2. The study `truth` trains
all recipes. Then searches with different seeds each have a quarter of the cost, and begin with a quarter of the rows.
The same command continues after an interruption. It prints the truth, then the rank and the gain of each search's
winner.
"""

import argparse
import csv
import json
import math
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "benchmarks")]

import mixture  # noqa: E402

from dj2mgm.storage.files import read_yaml, write_yaml  # noqa: E402

DROPPED, RATE = "recipe.batched_image_text_similarity_filter.lower_quantile", "finetune.learning_rate"
SPACE = {"sources.junk": [0.2, 1.0], "sources.poor": [0.4, 1.0], DROPPED: [0.0, 0.3, 0.6], RATE: [1.0e-3, 3.0e-4]}
TINY = {DROPPED: [0.0, 0.6], RATE: [1.0e-3, 3.0e-4]}
SEARCHES, PAIRS = 10, 625  # number of searches, and pairs of each source
REFERENCE = {"sources.junk": 1.0, "sources.poor": 1.0, DROPPED: 0.0, RATE: 1.0e-3}  # the values of `baseline`
HEADLINE = "finetune_answer_probability"
SIMILARITY = {"batched_image_text_similarity_filter": {"lower_quantile": 0.0}}


def write_inputs(folder: Path, space: dict[str, list], searches: int) -> None:
    """Write data, the recipe and the studies into a clone of the project."""
    mixture.write_sources(folder)
    write_yaml(folder / "config/recipes/similar.yaml", {"process": [{"image_integrity_filter": {}}, SIMILARITY]})
    study = {"experiment": "baseline", "controls": []}
    write_yaml(folder / "config/studies/truth.yaml", study | {"design": {"kind": "grid", "space": space}})
    candidates = math.prod(map(len, space.values()))
    for seed in range(searches):
        design = {"kind": "search", "space": space, "seed": seed, "trainings": max(2, candidates // 4)}
        design |= {"rungs": [0.25, 1.0], "keep": 0.25, "batch": 4}
        write_yaml(folder / f"config/studies/search_{seed}.yaml", study | {"design": design})


def run_study(folder: Path, name: str) -> None:
    mixture.run_target(folder, name, "dataset=mixture", "recipe=similar")


def read_truth(folder: Path, space: dict[str, list]) -> dict[tuple, float]:
    """Return the headline of each recipe by its values; the experiment itself is the recipe without changes."""
    with open(folder / "results/mixture/tiny/truth/truth.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {tuple(float(row[key] or REFERENCE[key]) for key in space): float(row[HEADLINE]) for row in rows}


def find_winner(folder: Path, name: str, space: dict[str, list]) -> tuple:
    """Return the values of the recipe with the highest score in a search, among recipes trained on all rows."""
    scores: dict[tuple, float] = {}
    for file in (folder / "results/mixture/tiny" / name / "search").rglob("trials.yaml"):
        record, batch_scores = read_yaml(file), read_yaml(file.with_name("scores.yaml"))["scores"]
        if record["fraction"] == 1:
            values = {trial["name"]: trial["changes"] for trial in record["trials"]}
            scores |= {
                tuple(float(values[trial][key]) for key in space): score
                for trial, score in batch_scores.items()
                if score is not None
            }
    return max(scores, key=scores.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    folder, space, searches = arguments.folder.resolve(), SPACE, SEARCHES
    mixture.PAIRS = PAIRS
    if arguments.tiny:
        space, searches, mixture.PAIRS = TINY, 2, 100
    if not (folder / "config/studies/truth.yaml").exists():  # newer files would run everything again
        write_inputs(folder, space, searches)
    run_study(folder, "truth")
    truth = read_truth(folder, space)
    ranking = sorted(truth, key=truth.__getitem__, reverse=True)
    for values in ranking:
        print(json.dumps(dict(zip(space, values, strict=True)) | {"headline": truth[values]}), flush=True)
    reference = truth[tuple(REFERENCE[key] for key in space)]
    for seed in range(searches):
        run_study(folder, f"search_{seed}")
        winner = find_winner(folder, f"search_{seed}", space)
        gain = (truth[winner] - reference) / (truth[ranking[0]] - reference)
        print(
            json.dumps({"search": seed, "rank": 1 + ranking.index(winner), "share of the best gain": gain}), flush=True
        )


if __name__ == "__main__":
    main()
