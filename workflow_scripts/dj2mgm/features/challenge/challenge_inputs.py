"""Settings of the challenge's table, from the runs of the compared experiments."""

from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.stages import BASE, Run


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
