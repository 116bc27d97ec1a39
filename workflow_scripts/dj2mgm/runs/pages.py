"""Settings of pages that compare experiments and of the challenge's table, and the files that pages read."""

from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.leaks import locate_leaks_folder
from dj2mgm.runs.run import Run
from dj2mgm.runs.stages import LEAK_FILES, STAGES, TASK_PREFIXES
from dj2mgm.settings.configuration import TARGETS_BY_KEY

DATASET_FILES = ("summary.json", "pretrain.jsonl", "evaluation.jsonl")  # files of a dataset that pages read
# keys that do not affect the results of an experiment; pages are not written again if one of them changes
NOT_SHOWN = {"seed", "description", "controls", *TARGETS_BY_KEY}


def locate_page_folder(runs: Runs, experiment: str) -> str:
    """Return the folder of an experiment's page, below results/.

    Compared experiments share results/<dataset>/<model>/report/. Each other experiment has a page with itself and the
    reference.
    """
    compared = experiment in runs.shared.report.experiments and experiment != REFERENCE
    return f"{runs.results_prefix}report" if compared else f"{runs.results_prefix}{experiment}/report"


def list_page_experiments(runs: Runs, page: str) -> list[str]:
    """Return the experiments of a page with their controls, beginning with the one that others are compared with."""
    page_name = page.removeprefix(runs.results_prefix)
    compared = runs.shared.report.experiments if page_name == "report" else [REFERENCE, str(Path(page_name).parent)]
    variant_names = runs.experiments.variant_names
    return list(dict.fromkeys(experiment for name in compared for experiment in (name, *variant_names.get(name, ()))))


def build_page_settings(runs: Runs, experiments: list[str], seeds: list[int] | None = None) -> dict:
    """Return the settings of a page that compares experiments.

    References also have the seeds of all other experiments. If `seeds` is given, every experiment has these instead.

    Raises:
        InputError: one of them is not valid.
    """
    runs.experiments.require(*experiments)
    configured_seeds = {name: runs.experiments.configs[name].seeds for name in experiments}
    all_seeds = list(dict.fromkeys(seed for own_seeds in configured_seeds.values() for seed in own_seeds))
    variants = [runs.experiments.variants[name] for name in experiments if name in runs.experiments.variants]
    references = {experiments[0], *(variant.compared[1] for variant in variants if variant.compared)}
    described = []
    for name in experiments:
        page_seeds = seeds or (all_seeds if name in references else configured_seeds[name])
        own_runs = [runs.get(name, seed) for seed in page_seeds]
        config = own_runs[0].config.model_dump(exclude=NOT_SHOWN)
        described.append(
            {
                "name": name,
                "description": runs.experiments.configs[name].description,
                "dataset": f"{DATASETS_FOLDER}/{own_runs[0].dataset.name}",
                "leaks": locate_leaks_folder(own_runs[0].dataset),
                "licenses": own_runs[0].dataset.settings.licenses,
                "config": config,
                "recipes": read_recipes(runs.experiments.configs[name]),
                "runs": [{"seed": run.seed, "stages": locate_stage_folders(runs, run)} for run in own_runs],
            }
            | _describe_control(runs, name)
        )
    return {"experiments": described}


def _describe_control(runs: Runs, name: str) -> dict:
    """Return the kind of a control, its experiment and its comparison; nothing for other experiments."""
    variant = runs.experiments.variants.get(name)
    if variant is None or variant.control is None:
        return {}
    compared = list(variant.compared) if variant.compared else None
    return {"control": {"kind": variant.control, "experiment": variant.parent, "compared": compared}}


def list_page_files(runs: Runs, experiments: list[str], seeds: list[int] | None = None) -> list[str]:
    """Return all files that a page of these experiments reads, with the arguments of `build_page_settings`."""
    files = set()
    for experiment in build_page_settings(runs, experiments, seeds)["experiments"]:
        files |= {f"{experiment['dataset']}/{name}" for name in DATASET_FILES}
        files |= {f"{experiment['leaks']}/{name}" for name in LEAK_FILES if experiment["leaks"]}
        for run in experiment["runs"]:
            for stage, folder in run["stages"].items():
                files |= {f"{folder}/{name}" for name in runs.stages[stage].outputs}
    return sorted(files)


def locate_stage_folders(runs: Runs, run: Run) -> dict[str, str]:
    """Return the folders of the stages that a page shows; benchmarks have a page of their own."""
    tasks = runs.shared.evaluations
    shown_stages = [*STAGES, *(f"{prefix}{task}" for prefix in TASK_PREFIXES for task in tasks)]
    return {stage: runs.find_stage_folder(run, stage) for stage in shown_stages if stage in run.settings}


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
