"""Where training data is looked through for what is evaluated on: which datasets, and beside what."""

from dj2mgm.config.runs import Runs
from dj2mgm.files import IMAGE_SUFFIXES, find_files


def leaks_of(dataset: dict) -> str | None:
    """Where the leaks of a run's dataset are listed; None for the embedded one, whose held-out scenes are drawn as the
    others are."""
    return None if "generator" in dataset["settings"] else f"results/datasets/{dataset['name']}/leaks"


def benchmarks_with_files(runs: Runs) -> dict[str, dict[str, str]]:
    """Those whose files are all configured."""
    return {name: files for name, files in runs.benchmarks.items() if None not in files.values()}


def reference_files(runs: Runs) -> list[str]:
    """Files of the benchmarks, without the folders of their images; and the images of the folders apart."""
    files = benchmarks_with_files(runs).values()
    apart = [str(file) for folder in runs.folders_apart for file in find_files(folder, IMAGE_SUFFIXES)]
    return [file for named in files for key, file in named.items() if key != "images"] + apart


def leak_settings(runs: Runs, dataset: str) -> dict:
    """Where the images of a dataset are, and those that they are compared with."""
    run = next(run for run in runs if run.dataset["name"] == dataset)
    roots = {f"{split}_images": folder for split, folder in run.dataset["images"].items()}
    others = {"benchmarks": benchmarks_with_files(runs), "folders": runs.folders_apart}
    return roots | others | {"cpu_threads": run.config["cpu_threads"]}
