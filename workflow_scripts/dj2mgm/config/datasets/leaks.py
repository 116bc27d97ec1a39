"""Leaks: near-duplicates of evaluated images, and questions of benchmarks, in the training data."""

from dj2mgm.config.datasets.experiment_dataset import RESULTS, Dataset
from dj2mgm.config.runs import Runs
from dj2mgm.config.settings.evaluation import LeakSettings
from dj2mgm.files import IMAGE_SUFFIXES, find_files


def leaks_folder(dataset: Dataset) -> str | None:
    """Return the folder with the leaks of a dataset.

    None for the embedded dataset, whose held-out scenes are drawn in the same way as the others.
    """
    return None if dataset.settings.is_drawn else f"{RESULTS}/{dataset.name}/leaks"


def benchmarks_with_files(runs: Runs) -> dict[str, dict[str, str]]:
    """Return the files of the completely configured benchmarks."""
    return {name: files for name, files in runs.shared.benchmarks.model_dump().items() if None not in files.values()}


def reference_files(runs: Runs) -> list[str]:
    """Return the files of evaluation images: files of benchmarks, and the images in `decontaminate.folders`."""
    files = benchmarks_with_files(runs).values()
    images = [str(file) for folder in runs.shared.decontaminate.folders for file in find_files(folder, IMAGE_SUFFIXES)]
    return [file for named in files for key, file in named.items() if key != "images"] + images


def leak_settings(runs: Runs, dataset: str) -> LeakSettings:
    """Return the folders of a dataset's images, and the images that they are compared with."""
    run = next(run for run in runs if run.dataset.name == dataset)
    roots = {f"{split}_images": folder for split, folder in run.dataset.images.items()}
    return LeakSettings.of(run.config, runs.shared.decontaminate, benchmarks=benchmarks_with_files(runs), **roots)
