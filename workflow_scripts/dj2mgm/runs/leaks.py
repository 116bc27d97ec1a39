"""Inputs and output folder of the search for leaks: evaluated images and questions in the training data."""

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER, Dataset
from dj2mgm.runs.all_runs import Runs
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
