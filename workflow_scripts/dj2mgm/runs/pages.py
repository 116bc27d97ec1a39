"""Settings of pages that compare experiments, the files that pages read, and the search for leaks."""

from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER, Dataset
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.stages import LEAK_FILES, Run
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.settings.evaluation import LeakSettings
from dj2mgm.storage.files import find_files
from dj2mgm.storage.image_files import IMAGE_SUFFIXES


def locate_leaks_folder(dataset: Dataset) -> str | None:
    """Return the folder with the leaks of a dataset.

    None for the embedded dataset, which is not searched: rendered scenes are similar without being leaks.
    """
    return None if dataset.settings.is_rendered else f"{DATASETS_FOLDER}/{dataset.name}/leaks"


def list_benchmark_files(runs: Runs) -> dict[str, dict[str, str]]:
    """Return the files of each benchmark whose files are all stated, by benchmark and key."""
    return {name: files for name, files in runs.shared.benchmarks.model_dump().items() if None not in files.values()}


def list_decontamination_files(runs: Runs) -> list[str]:
    """Return the files to compare training data with: tables of benchmarks, images in `decontaminate.folders`."""
    files = list_benchmark_files(runs).values()
    images = [str(file) for folder in runs.shared.decontaminate.folders for file in find_files(folder, IMAGE_SUFFIXES)]
    return [file for benchmark_files in files for key, file in benchmark_files.items() if key != "images"] + images


def build_leak_settings(runs: Runs, dataset: str) -> LeakSettings:
    """Return the settings of the search for leaks: image folders of a dataset, benchmarks, further images."""
    run = next(run for run in runs if run.dataset.name == dataset)
    roots = {f"{split}_images": folder for split, folder in run.dataset.images.items()}
    return LeakSettings.from_sections(
        run.config, runs.shared.decontaminate, benchmarks=list_benchmark_files(runs), **roots
    )


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
    """Return the folders of the stages that a page shows."""
    return {
        name: runs.find_stage_folder(run, name)
        for name, stage in runs.stages.items()
        if stage.in_report and name in run.settings
    }
