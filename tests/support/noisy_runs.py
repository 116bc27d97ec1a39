"""Finished runs with known noise, and the settings of a power analysis of them."""

import numpy as np

from dj2mgm.reporting.verdicts.decision_cost import FinishedRun, PowerSettings
from dj2mgm.storage.files import write_text
from evaluated_runs import write_scores

IMAGES = [f"e{number:03d}" for number in range(200)]


def write_finished_runs(folder, levels: dict[str, float], seeds: int) -> dict[str, list[FinishedRun]]:
    """Write runs with standard deviations of 0.1 per image and of 0.02 between seeds, for each side."""
    rng = np.random.default_rng(0)
    difficulty, runs = rng.normal(size=len(IMAGES)), {}
    for name, level in levels.items():
        own, runs[name] = 0.1 * rng.normal(size=len(IMAGES)), []
        for seed in range(seeds):
            values = level + 0.2 * difficulty + own + 0.02 * rng.normal()
            by_image = {image: (float(value), 1) for image, value in zip(IMAGES, values, strict=True)}
            run = folder / name / str(seed)
            write_scores(run / "evaluate_vqa/scores.jsonl", {"finetune/own": {"answer_probability": by_image}})
            write_scores(run / "evaluate_clip/scores.jsonl", {"finetune/own": {"clip_score": by_image}})
            write_text(run / "evaluate_vqa/x.benchmark.tsv", "s\th:m:s\n600\t0:10:00\n")
            stages = {stage: str(run / stage) for stage in ("evaluate_vqa", "evaluate_clip")}
            runs[name].append(FinishedRun(seed=seed, stages=stages, time=0.0))
    return runs


def build_power_settings(runs: dict[str, list[FinishedRun]], **keys) -> PowerSettings:
    own = {"headline": "answer_probability", "experiment": "other", "images": 200, "images_are_known": True, "seeds": 1}
    return PowerSettings(**own | keys, finished=runs)
