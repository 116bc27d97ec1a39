"""Settings of the challenge's table."""

from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.run import Run


def build_challenge_settings(runs: Runs) -> dict:
    """Return the settings of the challenge's table: every seed of the experiments that the report compares.

    The table also contains each of their models before training.

    Raises:
        InputError: a benchmark's files are not configured, or an experiment is not valid.
    """
    runs.experiments.require(*runs.shared.report.experiments)
    reference, benchmark_files = runs.shared.challenge.model_dump(), runs.shared.benchmarks.model_dump()
    scored_benchmarks = {name: benchmark_files[name] for name in reference["scores"]}
    files = {f"{name}.{key}": file for name, keys in scored_benchmarks.items() for key, file in keys.items()}
    if missing := [f"benchmarks.{name}" for name, file in files.items() if file is None]:
        raise InputError(
            f"the challenge needs {', '.join(missing)}: name them in config/config.yaml "
            "(docs/evaluation.md says where to get the files)"
        )
    compared_runs = [
        runs.get(name, seed) for name in runs.shared.report.experiments for seed in runs.experiments.configs[name].seeds
    ]
    first_runs = {run.config.model.name: run for run in reversed(compared_runs)}  # the first run with each model

    def describe(run: Run, experiment: str, seed: int | None, stage: str) -> dict:
        folders = {name: runs.find_stage_folder(run, f"{stage}/{name}") for name in scored_benchmarks}
        return {"experiment": experiment, "seed": seed, "benchmarks": folders}

    return reference | {
        "runs": [
            *(describe(run, f"{name} before training", None, "base_benchmarks") for name, run in first_runs.items()),
            *(describe(run, run.experiment, run.seed, "benchmarks") for run in compared_runs),
        ]
    }
