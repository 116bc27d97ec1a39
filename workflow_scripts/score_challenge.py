r"""Tabulate the challenge's score of each run, compared with the reference model's.

    python workflow_scripts/score_challenge.py --config results/shapes/tiny/challenge/config.yaml \
        --output-dir results/shapes/tiny/challenge

The score is the mean over the benchmarks of the ratio of the model's score to the reference model's. Writes
challenge.csv.
"""

import math
from pathlib import Path

import pandas as pd

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import InputError
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.features.challenge.challenge_keys import ChallengeScore, ChallengeSettings
from dj2mgm.reporting.comparison import write_table
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    table = tabulate_challenge(load_settings(ChallengeSettings, paths.config))
    print(table.round(2).to_string(index=False), flush=True)
    write_table(table, paths.output_dir / "challenge.csv")


def tabulate_challenge(settings: ChallengeSettings) -> pd.DataFrame:
    """Tabulate the reference, models before training, and runs, with mean and standard deviation over several seeds.

    Columns: experiment, seed, each benchmark's score in percent and its ratio, `challenge_score`, and for benchmarks
    with images in the training data the score without the questions about these images.
    """
    scores, leaking_benchmarks = settings.scores, _find_leaking_benchmarks(settings)
    reference = _build_row(
        settings.reference, "reference", {name: entry.score for name, entry in scores.items()}, scores
    )
    rows = []
    for run in settings.runs:
        run_scores = {name: _read_score(Path(run.benchmarks[name]), settings, name) for name in scores}
        unleaked_scores = {
            f"{name}_without_leaked": _read_unleaked_score(Path(run.benchmarks[name])) for name in leaking_benchmarks
        }
        rows.append(_build_row(run.experiment, run.seed, run_scores, scores) | unleaked_scores)
    table = pd.DataFrame(rows)
    for experiment, runs in table.groupby("experiment", sort=False):
        if len(runs) > 1:
            figures = runs.drop(columns=["experiment", "seed"])
            rows.append({"experiment": experiment, "seed": "mean"} | figures.mean().to_dict())
            rows.append({"experiment": experiment, "seed": "standard deviation"} | figures.std().to_dict())
    return pd.DataFrame([reference, *rows])


def _build_row(
    experiment: str, seed: int | str | None, scores: dict[str, float], reference: dict[str, ChallengeScore]
) -> dict:
    row: dict = {"experiment": experiment, "seed": seed}
    ratios = {name: score / reference[name].score for name, score in scores.items()}
    for name, score in scores.items():
        row |= {name: score, f"{name}_ratio": ratios[name]}
    return row | {"challenge_score": sum(ratios.values()) / len(ratios)}


def _find_leaking_benchmarks(settings: ChallengeSettings) -> list[str]:
    folders = {name: [Path(run.benchmarks[name]) for run in settings.runs] for name in settings.scores}
    return [
        name
        for name, run_folders in folders.items()
        if any("without_leaked" in read_json(folder / "metrics.json") for folder in run_folders)
    ]


def _read_unleaked_score(folder: Path) -> float:
    """Read the score without the questions that leak (of all questions if none leaks); NaN if no question is left."""
    metrics = read_json(folder / "metrics.json")
    estimates = metrics.get("without_leaked", metrics)["estimates"]
    return Estimate(**estimates["score"]).mean if "score" in estimates else math.nan


def _read_score(folder: Path, settings: ChallengeSettings, name: str) -> float:
    """Read a benchmark's score in percent, and check that it can be compared with the reference's."""
    path, variant = folder / "metrics.json", settings.scores[name].variant
    metrics = read_json(path)
    if metrics["variant"] != variant:
        raise InputError(
            f"{path}: {name} was run in the variant {metrics['variant']}, but the score of {settings.reference} is of "
            f"the variant {variant}, and scores of different prompts cannot be compared. Use files of that variant, or "
            f"state the reference's score for {metrics['variant']} in challenge.scores.{name}."
        )
    if "score" not in metrics["estimates"]:
        raise InputError(f"{path}: {name} has no score, because its file has no answers. Use a split with answers.")
    return Estimate(**metrics["estimates"]["score"]).mean


if __name__ == "__main__":
    main()
