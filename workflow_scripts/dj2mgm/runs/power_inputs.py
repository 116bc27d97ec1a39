"""Inputs of a power analysis: the size of a planned comparison, and finished runs, from which noise is estimated."""

import re
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER as DATASETS
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.run import Run
from dj2mgm.settings.dataset_files import MAX_HELD_OUT
from dj2mgm.storage.files import read_json

SCORED_STAGES = ("evaluate_clip", "evaluate_vqa")


def build_power_settings(runs: Runs) -> dict:
    """Return the settings of the power analysis.

    It is about the experiment in the key `experiment`, or else about the first one on the report.
    """
    other_names = [name for name in runs.shared.report.experiments if name != REFERENCE]
    experiment = runs.experiments.get_requested("plan", next(iter(other_names), REFERENCE))
    images = _count_held_out_images(runs.first_seed(REFERENCE))
    finished = {name: _list_finished_runs(runs, name) for name in dict.fromkeys([REFERENCE, *runs.experiments.names])}
    return {
        "headline": runs.shared.report.headline,
        "experiment": experiment,
        "images": images or MAX_HELD_OUT,
        "images_are_known": images is not None,
        "seeds": len(runs.experiments.configs.get(experiment, runs.experiments.configs[REFERENCE]).seeds),
        "finished": {name: finished_runs for name, finished_runs in finished.items() if finished_runs},
    }


def _count_held_out_images(run: Run) -> int | None:
    """Return the number of held-out images; None if the dataset is not made yet and does not state it."""
    summary = Path(DATASETS, run.dataset.name, "summary.json")
    if summary.is_file():
        return read_json(summary).get("evaluation")
    return run.dataset.settings.evaluation_images if run.dataset.settings.is_rendered else None


def _list_finished_runs(runs: Runs, experiment: str) -> list[dict]:
    """Return the runs of an experiment that are scored on the reference's dataset, with any seed."""
    first_run, dataset = runs.first_seed(experiment), runs.first_seed(REFERENCE).dataset.name
    if first_run.dataset.name != dataset:
        return []
    folders = Path("results", first_run.folder).glob("seed-*")
    other_seeds = (int(match[1]) for folder in folders if (match := re.fullmatch(r"seed-([0-9]+)", folder.name)))
    scored_runs = []
    for seed in sorted({*runs.experiments.configs[experiment].seeds, *other_seeds}):
        run = runs.get(experiment, seed)
        stages = {stage: runs.find_stage_folder(run, stage) for stage in run.settings}
        scores = [Path(stages[stage], "scores.jsonl") for stage in SCORED_STAGES]
        if all(file.is_file() for file in scores):
            scored_runs.append({"seed": seed, "stages": stages, "time": max(file.stat().st_mtime for file in scores)})
    return scored_runs
