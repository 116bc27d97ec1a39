"""Checks of the jobs of a command before the first one starts."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER as DATASETS
from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import check_clip_folder, check_model_folders
from dj2mgm.records.page_records import VERDICT_FILE
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import list_page_experiments, locate_page_folder
from dj2mgm.runs.publication_check import refuse_unlearned
from dj2mgm.runs.run import Run
from dj2mgm.runs.stages import STAGES, TRAINING_STAGES
from dj2mgm.settings.config_files import list_config_names
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.storage.files import read_if_whole

CRATE, PUBLISHED, EXPORT = "crate", "publish", "export"


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


def check_jobs(runs: Runs, jobs: Iterable[PlannedJob], targets: Iterable[PlannedJob]) -> None:
    """Refuse jobs that would replace another dataset, that their target may not start, or that cannot succeed.

    These are jobs that would replace a dataset of the same name, stages that `crate`, `publish` or `export` may not
    run, jobs whose model is missing, and the publication of a model that has learned nothing.

    Args:
        jobs: the jobs that would run.
        targets: the jobs that the command line names.

    Raises:
        InputError: the message says how to continue.
    """
    jobs, targets = list(jobs), list(targets)
    for name in sorted({job.dataset for job in jobs if job.dataset}):
        _check_dataset(runs, name)
    _check_starts_no_training(runs, jobs, targets)
    _check_published(runs, targets)
    for name in sorted({job.model for job in jobs if job.model}):
        check_model_folders(runs.models[name])
    for job in jobs:
        for folder in _list_stage_folders(runs, job):
            _check_clip(runs.by_folder(job.run), Path(folder).name)


def _check_dataset(runs: Runs, name: str) -> None:
    """Refuse a dataset with the name of another one, unless the other folder is missing: it was probably moved."""
    new_settings = runs.datasets[name].settings.file_content() if name in runs.datasets else {}
    old, new = (
        _find_dataset_source(name, settings)
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


def _check_starts_no_training(runs: Runs, jobs: list[PlannedJob], targets: list[PlannedJob]) -> None:
    """Refuse `crate` and `publish` if they would run any stage, and `export` if it would train."""
    kinds = [_find_kind(target) for target in targets]
    if not kinds or None in kinds:
        return
    allowed_stages = (
        set(STAGES) - set(TRAINING_STAGES) if {kind for kind, _ in filter(None, kinds)} == {EXPORT} else set()
    )
    stages = [
        stage for job in jobs for stage in _list_stage_folders(runs, job) if Path(stage).name not in allowed_stages
    ]
    if not stages:
        return
    kind, experiment = next(filter(None, kinds))
    same = " with the same --config" if runs.experiments.command_line.keys() - TARGETS_BY_KEY.keys() else ""
    target = _find_target(runs, experiment)
    finished = all(any(Path(stage).glob("*.json*")) for stage in stages)
    problem = f"{min(stages)} is out of date" if finished else f"{target} has not finished"
    raise InputError(f"{kind}: {problem}, and {kind} starts no training. Run `snakemake {target}`{same} first")


def _check_published(runs: Runs, targets: list[PlannedJob]) -> None:
    """Refuse models that have learned nothing according to their page; publishing makes and checks a missing page."""
    for _, folder in (pair for pair in map(_find_kind, targets) if pair and pair[0] == PUBLISHED):
        experiment = runs.by_folder(folder).experiment
        verdict = Path("results", locate_page_folder(runs, experiment), VERDICT_FILE)
        if verdict.is_file():
            refuse_unlearned(experiment, verdict, runs.shared.publish.allow_unlearned)


def _find_kind(target: PlannedJob) -> tuple[str, str] | None:
    """Return the kind of a target and the folder of its run or page; None for targets of other kinds."""
    for file in target.files:
        patterns = {
            CRATE: r"results/(.+)/crate/run\.crate\.zip",
            PUBLISHED: r"results/published/(.+)/(?:model|dataset)(?:\.pushed\.json|/README\.md)",
            EXPORT: r"results/(.+)/export/[^/]+/README\.md",
        }
        for kind, pattern in patterns.items():
            if match := re.search(pattern, file):
                return kind, match[1]
    return None


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


def _find_dataset_source(dataset: str, settings: dict) -> Path | None:
    """Return the folder or file of a dataset's rows: a path with the dataset's name, otherwise its image folder."""
    sources = settings.get("sources")
    parts = [*(sources.values() if isinstance(sources, dict) else ()), settings.get("pretrain")]
    part = next((part for part in parts if isinstance(part, dict)), {})
    paths = [Path(part[key]) for key in ("path", "file", "images") if isinstance(part.get(key), str)]
    candidates = (candidate for path in paths for candidate in (path, *path.parents))
    matches = (candidate for candidate in candidates if dataset in (candidate.resolve().name, candidate.stem))
    return next(matches, paths[-1] if paths else None)
