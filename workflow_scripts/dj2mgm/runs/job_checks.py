"""Checks of the jobs of a command before the first one starts."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER as DATASETS
from dj2mgm.dataset_resolution.experiment_dataset import find_dataset_source
from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import MissingModelError, check_clip_folder, check_model_folders
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import list_page_experiments
from dj2mgm.runs.run import Run
from dj2mgm.runs.stages import STAGES, TRAINING_STAGES
from dj2mgm.settings.config_files import list_config_names
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.storage.files import read_if_whole


@dataclass(frozen=True)
class PlannedJob:
    """A job of Snakemake that would run, or that the command line names.

    Attributes:
        files: its outputs, or its inputs if it is a target without outputs.
        rule: name of its rule.
        is_stage: whether its time is measured.
        run: its wildcard `run`, the folder of a run below results/.
        dataset, model: its wildcards of these names.
    """

    files: tuple[str, ...]
    rule: str = ""
    is_stage: bool = False
    run: str | None = None
    dataset: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class ReadingTarget:
    """A target that reads finished runs and starts no training.

    Attributes:
        files: pattern of its files; the group is the folder of the run or of the page, below results/.
        selects_rows: whether it may run the stages before training.
    """

    files: str
    selects_rows: bool = False

    def find_folder(self, target: PlannedJob) -> str | None:
        """Return the folder of the run or page; None for another target."""
        matches = (re.search(self.files, file) for file in target.files)
        return next((match[1] for match in matches if match), None)


def check_jobs(
    runs: Runs,
    jobs: Iterable[PlannedJob],
    targets: Iterable[PlannedJob],
    reading_targets: Mapping[str, ReadingTarget],
) -> None:
    """Refuse jobs that would replace another dataset, or that their target may not start.

    Args:
        runs: all runs.
        jobs: the jobs that would run.
        targets: the jobs that the command line names.
        reading_targets: targets that start no training, by name.

    Raises:
        InputError: the message says how to continue.
    """
    jobs, targets = list(jobs), list(targets)
    for name in sorted({job.dataset for job in jobs if job.dataset}):
        _check_dataset(runs, name)
    _check_starts_no_training(runs, jobs, targets, reading_targets)


def list_missing_models(runs: Runs, jobs: Iterable[PlannedJob]) -> Iterator[MissingModelError]:
    """Yield an error about each model that jobs need and `snakemake fetch` downloads; raise other errors."""
    for job in jobs:
        try:
            if job.model:
                check_model_folders(runs.models[job.model])
            for folder in _list_stage_folders(runs, job):
                _check_clip(runs.by_folder(job.run), Path(folder).name)
        except MissingModelError as error:
            yield error


def _check_dataset(runs: Runs, name: str) -> None:
    """Refuse a dataset with the name of another one, unless the other folder is missing: it was probably moved."""
    new_settings = runs.datasets[name].settings.file_content() if name in runs.datasets else {}
    old, new = (
        find_dataset_source(name, settings)
        for settings in (read_if_whole(Path(DATASETS, name, "config.yaml")), new_settings)
    )
    if name in list_config_names("datasets") or not (old and new and old.exists()) or old.resolve() == new.resolve():
        return
    if (Path(DATASETS, name) / "summary.json").is_file():
        raise InputError(
            f"{DATASETS}/{name}: it was made from {old}, and this command would replace it with {new}. Add "
            f"`--config {shlex.quote(f'dataset={old}')}` to continue with it, rename one of the folders, or delete "
            f"{DATASETS}/{name} and results/{name}"
        )


def _check_clip(run: Run, stage: str) -> None:
    """Check the folder of a stage's CLIP if the model's file states this CLIP."""
    if getattr(run.settings.get(stage), "clip", None) == run.config.model.clip:
        check_clip_folder(run.config.model)


def _check_starts_no_training(
    runs: Runs, jobs: list[PlannedJob], targets: list[PlannedJob], reading_targets: Mapping[str, ReadingTarget]
) -> None:
    """Refuse stages if all targets only read finished runs."""
    readers = [
        (name, kind, folder)
        for target in targets
        for name, kind in reading_targets.items()
        if (folder := kind.find_folder(target))
    ]
    if not readers or len(readers) < len(targets):
        return
    selects_rows = all(kind.selects_rows for _, kind, _ in readers)
    allowed_stages = set(STAGES) - set(TRAINING_STAGES) if selects_rows else set()
    stages = [
        stage for job in jobs for stage in _list_stage_folders(runs, job) if Path(stage).name not in allowed_stages
    ]
    if not stages:
        return
    name, _, folder = readers[0]
    same = " with the same --config" if runs.experiments.command_line.keys() - TARGETS_BY_KEY.keys() else ""
    target = _find_target(runs, folder)
    finished = all(any(Path(stage).glob("*.json*")) for stage in stages)
    problem = f"{min(stages)} is out of date" if finished else f"{target} has not finished"
    raise InputError(f"{name}: {problem}, and {name} starts no training. Run `snakemake {target}`{same} first")


def _find_target(runs: Runs, folder: str) -> str:
    """Return the target of `snakemake` that makes a folder of a run or of a page."""
    on_page = Path(folder).name == "report"
    experiment = list_page_experiments(runs, folder)[-1] if on_page else runs.by_folder(folder).experiment
    if experiment in runs.experiments.names:
        return experiment
    return next((target for target, names in runs.experiments.variant_names.items() if experiment in names), experiment)


def _list_stage_folders(runs: Runs, job: PlannedJob) -> Iterator[str]:
    for file in job.files if job.run else ():
        folder, name = Path(file).parent, Path(file).name
        if name != "config.yaml" and str(folder).endswith(tuple(f"{job.run}/{stage}" for stage in runs.stages)):
            yield str(folder)
