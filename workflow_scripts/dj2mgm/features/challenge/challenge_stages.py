"""Stages of benchmarks, for the fine-tuned model and the model before training, and the challenge's table."""

from functools import partial

from dj2mgm.errors import InputError
from dj2mgm.features.challenge.challenge_keys import BenchmarkSettings, list_benchmark_files, read_declarations
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.stage_settings import build_answer_values
from dj2mgm.runs.stages import BASE, Run, Stage
from dj2mgm.settings.configuration import Configuration, Experiment


def list_stages(shared: Configuration) -> dict[str, Stage]:
    """Return the stages of every declared benchmark by name. The report does not show them."""
    return {name: stage for benchmark in read_declarations() for name, stage in _build_stages(benchmark).items()}


def _build_stages(name: str) -> dict[str, Stage]:
    common = {
        "rule": "answer_benchmark",
        "settings": partial(build_benchmark_settings, name),
        "outputs": ("answers.jsonl",),
        "in_report": False,
    }
    return {
        f"benchmarks/{name}": Stage(name, upstream=("finetune",), **common),
        f"{BASE}benchmarks/{name}": Stage(f"{name}, before training", upstream=(), uses_dataset=False, **common),
    }


def build_benchmark_settings(name: str, config: Experiment, images: dict) -> BenchmarkSettings | None:
    """Return the settings of a benchmark, or None unless all its files are configured."""
    files = list_benchmark_files(config).get(name)
    return files and BenchmarkSettings.from_sections(config, benchmark=name, files=files, **build_answer_values(config))


def build_challenge_settings(runs: Runs) -> dict:
    """Return the settings of the challenge's table: every seed of the experiments that the report compares.

    The table also contains each of their models before training.

    Raises:
        InputError: a benchmark's files are not configured, or an experiment is not valid.
    """
    runs.experiments.require(*runs.shared.report.experiments)
    reference, benchmark_files = runs.shared.challenge.model_dump(), runs.shared.benchmarks.model_dump()
    missing = [name for name in reference["scores"] if name not in benchmark_files]
    missing += [
        f"{name}.{key}"
        for name in reference["scores"]
        for key, file in benchmark_files.get(name, {}).items()
        if file is None
    ]
    if missing:
        raise InputError(
            f"the challenge needs {', '.join(f'benchmarks.{key}' for key in missing)}: name them in config/config.yaml "
            "(docs/features/challenge.md says where to get the files)"
        )
    compared_runs = [
        runs.get(name, seed) for name in runs.shared.report.experiments for seed in runs.experiments.configs[name].seeds
    ]
    first_runs = {run.config.model.name: run for run in reversed(compared_runs)}  # the first run with each model

    def describe(run: Run, experiment: str, seed: int | None, stage: str) -> dict:
        folders = {name: runs.find_stage_folder(run, f"{stage}/{name}") for name in reference["scores"]}
        return {"experiment": experiment, "seed": seed, "benchmarks": folders}

    return reference | {
        "runs": [
            *(describe(run, f"{name} before training", None, f"{BASE}benchmarks") for name, run in first_runs.items()),
            *(describe(run, run.experiment, run.seed, "benchmarks") for run in compared_runs),
        ]
    }
