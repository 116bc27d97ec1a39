"""Experiments whose scores vary around a level, for pages with verdicts."""

from pathlib import Path

import numpy as np

from dj2mgm.reporting.experiment_results import ExperimentResults, load_experiments
from dj2mgm.storage.files import write_text, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run

IMAGES = [f"e{number:03d}" for number in range(100)]
MINUTES = 3  # seconds of each stage except the filter


def make_scores(level: float, seed: int, spread: float) -> dict:
    """Return probabilities of the right answer around `level` on own images, and lower ones on shuffled images."""
    rng = np.random.default_rng([seed, int(10000 * level)])
    level += spread * rng.normal() / 4  # the effect of the seed
    own = np.clip(level + spread * rng.standard_normal(len(IMAGES)), 0, 1)
    measured = {"own": own, "shuffled": own / 2}
    return {
        f"finetune/{images}": {
            "answer_probability": {name: (float(value), 1) for name, value in zip(IMAGES, values, strict=True)},
            "answer_log_likelihood": {name: (float(value) - 1, 1) for name, value in zip(IMAGES, values, strict=True)},
        }
        for images, values in measured.items()
    }


def write_levels(
    folder: Path, levels: dict[str, float], seeds: int, spread: float = 0.02, **report
) -> list[ExperimentResults]:
    """Write experiments with their levels and seeds, and the page's configuration; return the results."""
    dataset = write_dataset(folder / "dataset")
    entries = []
    for name, level in levels.items():
        runs = {}
        for seed in range(seeds):
            runs[seed] = write_run(folder / name / str(seed), {}, make_scores(level, seed, spread))
            for stage, output in runs[seed].items():
                seconds = 60 * MINUTES if stage != "filter" else 9999
                write_text(folder / output / f"{stage}.benchmark.tsv", f"s\th:m:s\n{seconds}\t0:03:00\n")
        entries.append(build_entry(name, dataset, runs, report=report))
    write_yaml(folder / "config.yaml", {"experiments": entries})
    return load_experiments(folder / "config.yaml")
