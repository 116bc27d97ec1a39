"""Checks, settings and messages of a command: risks, refused jobs, rows and time of a dry run, and the plan."""

import difflib
import os
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dj2mgm.cli.command_line import escape_control
from dj2mgm.cli.messages import format_duration
from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER, find_dataset_source
from dj2mgm.errors import InputError, pluralize
from dj2mgm.model_files.missing_models import (
    MissingModelError,
    check_clip_folder,
    check_judge,
    check_made,
    check_model_folders,
    compute_download_gb,
    find_downloads,
    find_missing_models,
)
from dj2mgm.records import read_jsonl_summary
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.layers import EMBEDDED_DEFAULTS
from dj2mgm.runs.pages import list_page_experiments, read_benchmark_seconds
from dj2mgm.runs.stage_settings import has_gpu
from dj2mgm.runs.stages import STAGES, TRAINING_STAGES, Run
from dj2mgm.settings.config_files import list_config_names
from dj2mgm.settings.configuration import TARGETS_BY_KEY, Experiment
from dj2mgm.settings.models import ModelFile
from dj2mgm.settings.training_stages import count_samples, describe_steps, find_steps
from dj2mgm.storage.files import read_if_whole, read_json

MAX_TRAININGS = 6  # trainings listed; a study may have hundreds
DEFAULT_MINUTES = (4, 13)  # of an experiment on the embedded default (docs/performance.md)
WIDTH = 80  # columns
SUFFIX = ".benchmark.tsv"
SHARED_FOLDERS = {"datasets", "foundation", "models"}
LARGE_FOLDERS = {"images", "checkpoints", "captions", "published"}  # without benchmark files


@dataclass(frozen=True)
class RowCount:
    """Rows that a stage trains on in one epoch; `different` leaves out the repetitions of a row in the file."""

    rows: int
    different: int
    is_exact: bool  # False: the numbers are upper bounds

    def describe(self) -> str:
        rows = f"{'' if self.is_exact else 'at most '}{pluralize(self.rows, 'row')}"
        return rows if self.different == self.rows else f"{rows}, {self.different:,} of them different"


def count_training_rows(runs: Runs, run: Run, planned_folders: Collection[Path] = ()) -> dict[str, RowCount]:
    """Return the rows of each training stage of a run; none if nothing has counted them.

    Args:
        planned_folders: folders whose files will be written again, so that their counts say nothing.
    """
    return assign_rows(_read_counts(runs, run, planned_folders), run.training_stages)


def assign_rows(counts: dict[str, RowCount], stages: Collection[str]) -> dict[str, RowCount]:
    """Return the rows of each training stage from those of both training files."""
    if counts and len(stages) == 1:  # it trains on both files
        sums = (sum(getattr(count, key) for count in counts.values()) for key in ("rows", "different"))
        counts = {stage: RowCount(*sums, counts["finetune"].is_exact) for stage in stages}
    elif counts and not counts["finetune"].rows:  # without instructions, stage 2 trains on the pairs
        counts["finetune"] = counts["pretrain"]
    return {stage: count for stage, count in counts.items() if count.rows}


def _read_counts(runs: Runs, run: Run, planned_folders: Collection[Path]) -> dict[str, RowCount]:
    """Return the rows of both training files by stage; a run without these files gets as many rows as the reference."""
    for owner in (run, runs.get(REFERENCE, run.seed)):
        written = Path(runs.find_stage_folder(owner, "jsonl"))
        if (written / "summary.json").is_file() and written not in planned_folders:
            files = read_jsonl_summary(written / "summary.json").files
            rows = {stage: files[stage].rows_out for stage in TRAINING_STAGES}
            different = {stage: files[stage].different_rows for stage in TRAINING_STAGES} if owner is run else rows
            return {stage: RowCount(rows[stage], different[stage], owner is run) for stage in TRAINING_STAGES}
    settings, made = run.dataset.settings, Path(DATASETS_FOLDER, run.dataset.name)
    if (made / "summary.json").is_file() and made not in planned_folders:
        rows = read_json(made / "summary.json")
    elif settings.is_rendered:
        rows = {"pretrain": settings.pretrain_pairs, "finetune": settings.finetune_instructions}
    else:
        return {}
    numbers = {stage: min(rows[stage], run.config.jsonl.max_samples) for stage in TRAINING_STAGES}
    return {stage: RowCount(number, number, False) for stage, number in numbers.items()}


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
        for settings in (read_if_whole(Path(DATASETS_FOLDER, name, "config.yaml")), new_settings)
    )
    if name in list_config_names("datasets") or not (old and new and old.exists()) or old.resolve() == new.resolve():
        return
    if (Path(DATASETS_FOLDER, name) / "summary.json").is_file():
        raise InputError(
            f"{DATASETS_FOLDER}/{name}: it was made from {old}, and this command would replace it with {new}. Add "
            f"`--config {shlex.quote(f'dataset={old}')}` to continue with it, rename one of the folders, or delete "
            f"{DATASETS_FOLDER}/{name} and results/{name}"
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


def list_start_messages(runs: Runs, words: Collection[str] = ()) -> Iterator[str]:
    """Yield a line about each risk and each guess; names of the user's files are untrusted.

    `words` are those of the command line. `check` prints its guesses itself and advises a model, and requested
    experiments fail.
    """
    if runs.shared.trusted_recipes:
        yield (
            "warning: trusted_recipes is true: recipes may run code, ask servers, and write or delete files; run only "
            "recipes that you have read"
        )
    for dataset in runs.datasets.values() if "check" not in words else ():
        if not Path(DATASETS_FOLDER, dataset.name, "summary.json").is_file():  # else an earlier command has shown it
            yield from map(escape_control, dataset.note.splitlines())
    detected = (run.config.model for run in runs if run.dataset.note and "check" not in words)
    for name in sorted({model.name for model in detected if model.trained_by_workflow}):
        yield (
            f"note: the model {name} is made for rendered scenes, and its scores on photos mean nothing. For a verdict "
            "on photos, name another model (docs/models.md)."
        )
    for warning in runs.experiments.list_warnings({*words, *runs.shared.experiment}):
        end = "" if warning.endswith("?") else "."
        yield f"warning: {escape_control(warning)}{end} Other experiments are not affected."


def build_command(words: str, config_arguments: Iterable[str] = ()) -> str:
    """Return a `snakemake` command with the values of --config, without those that are for other targets only."""
    keys = {argument: argument.split("=")[0] for argument in config_arguments}
    used = [argument for argument, key in keys.items() if {*TARGETS_BY_KEY.get(key, words.split())} & {*words.split()}]
    return f"snakemake {words}" + (f" --config {shlex.join(used)}" if used else "")


def summarize_jobs(
    runs: Runs,
    jobs: Iterable[PlannedJob],
    targets: Iterable[PlannedJob],
    missing: Iterable[str] = (),
    config_arguments: Iterable[str] = (),
) -> list[str]:
    """Return lines of at most 80 columns about the jobs of a dry run; only the results if nothing would run.

    Args:
        runs: all runs.
        jobs: the jobs that would run.
        targets: the jobs that the command line names.
        missing: sentences about models that are still to be fetched; they come first.
        config_arguments: the command line's values of --config.
    """
    jobs = list(jobs)
    if not jobs:
        return list_results(targets)
    hint = "`--verbose` lists all jobs with their commands."
    stages = [job for job in jobs if job.is_stage]
    if not stages:
        return ["", f"Summary: no stage would run, only {', '.join(sorted({job.rule for job in jobs}))}. {hint}"]
    trainings = [
        (runs.by_folder(job.run), stage)
        for job in stages
        for stage in TRAINING_STAGES
        if job.run and job.files[0].startswith(f"results/{job.run}/{stage}/")
    ]
    trainings = sorted(reversed(trainings), key=lambda training: training[0].seed)  # jobs come from the targets back
    count = f"{pluralize(len(stages), 'stage')} would run"
    lines = ["", *(line for text in missing for line in _wrap(f"First: {text}."))]
    lines.append(f"Summary: {count}, {len(trainings):,} of them a training.")
    planned_folders = {Path(file).parent for job in stages for file in job.files}
    lines += [f"  {_describe_training(runs, *training, planned_folders)}" for training in trainings[:MAX_TRAININGS]]
    if len(trainings) > MAX_TRAININGS:
        lines.append(f"  … and {pluralize(len(trainings) - MAX_TRAININGS, 'more training')}")
    lines += _wrap(f"Time: {_estimate_time(runs, stages, config_arguments)}.")
    return [*lines, *list_results(targets), hint]


def check_clips(config: Experiment, models: Mapping[str, ModelFile]) -> None:
    """Check the CLIPs of an experiment: judges are complete, and the workflow makes those in results/foundation.

    Raises:
        InputError: names the setting.
    """
    judges = {f"evaluate.{key}": getattr(config.evaluate, key) for key in ("judge_clip", "second_judge")}
    trained = {name for name, model in models.items() if model.trained_parts is model}
    for key, name in judges.items():
        if name:
            check_judge(name, key)
    for key, name in ({"clip": config.model.clip} | judges).items():
        if name:
            check_made(name, key, trained)


def check_used_keys(targets: Collection[str], arguments: Iterable[str]) -> None:
    """Refuse a key after `--config` that is for other targets than the requested ones; files may need any key."""
    if any("/" in target for target in targets):
        return
    for key in sorted({argument.split("=")[0] for argument in arguments}):
        users = TARGETS_BY_KEY.get(key)
        if users and not {*users} & {*targets}:
            raise InputError(
                f"{key}: `snakemake {' '.join(sorted(targets))}` does not use this key, which is for "
                f"{', '.join(users)}; remove it"
            )


def describe_unknown_target(runs: Runs, name: str, targets: Collection[str]) -> str:
    """Return the message about a target that nothing makes."""
    if "=" in name:
        return f"{name}: a setting follows --config, as in `snakemake baseline --config {name}`"
    near = difflib.get_close_matches(name, sorted(targets), n=1)
    experiments = runs.experiments.names
    if "/" in name:
        folders = [f"results/{runs.first_seed(experiment).folder}" for experiment in experiments]
        near = difflib.get_close_matches(str(Path(*Path(name).parts[:4])), folders, n=1)
    known = f"targets are {', '.join(experiments)}; `snakemake help` lists others"
    return f"{name}: nothing makes this target; {f'did you mean {near[0]}?' if near else known}"


def list_results(targets: Iterable[PlannedJob]) -> list[str]:
    """Return lines with the pages of the targets, or with other files if there are none."""
    results = [Path(file) for target in targets for file in target.files if file.startswith("results/")]
    pages = [file for file in results if file.suffix == ".html"]
    results = pages or [file for file in results if file.suffix != ".yaml"]  # settings are read, not made for users
    return [f"Result: {file}" for file in results[:3]]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _describe_training(runs: Runs, run: Run, stage: str, planned_folders: set[Path]) -> str:
    """Return the rows and steps of a training, as far as they are known before the planned jobs have run."""
    label = f"{stage} of {run.name}"
    count = count_training_rows(runs, run, planned_folders).get(stage)
    if not count:
        return f"{label}: the number of rows is not known yet"
    return f"{label}: {count.describe()}, {pluralize(find_steps(run.settings[stage], count.rows), 'step')}"


def _estimate_time(runs: Runs, stages: list[PlannedJob], config_arguments: Iterable[str]) -> str:
    """Return the sum of the times that the same rules took before with the same dataset and model."""
    models = {"/".join(job.run.split("/")[:2]) for job in stages if job.run}
    seconds = _read_seconds_by_rule(models)
    measured_times = [median(seconds[job.rule]) for job in stages if job.rule in seconds]
    trainings = [job for job in stages if job.rule.startswith(TRAINING_STAGES)]
    if any(job.rule not in seconds for job in trainings):
        keys = {argument.split("=")[0] for argument in config_arguments}
        knows_gpu = runs.shared.gpu or has_gpu()
        is_default = models == {"/".join(EMBEDDED_DEFAULTS.values())} and keys <= {*TARGETS_BY_KEY, "seeds"}
        is_default &= all(job.rule != "finetune_minimal" for job in trainings)
        if is_default and not knows_gpu:
            count = len({job.run for job in trainings})
            runs_note = f" for {count} experiments or seeds" if count > 1 else ""
            low, high = (minutes * count for minutes in DEFAULT_MINUTES)
            return f"about {low} to {high} minutes on two cores{runs_note}"
        if not knows_gpu and all(runs.by_folder(job.run).config.model.trained_by_workflow for job in trainings):
            return "trainings have not run here yet; the first steps of each tell its time"
        card = [] if knows_gpu else ["gpu=rtx-4090"]
        plan = build_command("plan", [*config_arguments, *card])
        return f"trainings have not run here yet; `{plan}` predicts it{' for that card' if card else ''}"
    if not measured_times:
        return "these stages have not run here yet"
    total = format_duration(sum(measured_times))
    if len(measured_times) == len(stages):
        return f"about {total}, as these stages took here before"
    return f"more than {total}, which {len(measured_times)} of the {len(stages)} stages took here before"


def _read_seconds_by_rule(models: set[str]) -> dict[str, list[float]]:
    """Return the times of each rule's finished jobs in seconds, from Snakemake's benchmark files.

    Args:
        models: folders of dataset and model, below results/, whose runs count.
    """
    seconds: dict[str, list[float]] = {}
    for folder, subfolders, names in os.walk("results"):
        subfolders[:] = [name for name in subfolders if name not in LARGE_FOLDERS]
        parts = Path(folder).parts[1:]
        counts = parts[:1] and parts[0] in SHARED_FOLDERS or "/".join(parts[:2]) in models
        for name in names if counts else ():
            if name.endswith(SUFFIX):
                if time := read_benchmark_seconds(Path(folder, name)):
                    seconds.setdefault(name.removesuffix(SUFFIX), []).append(time)
    return seconds


def build_plan_settings(runs: Runs, run: Run, arguments: Iterable[str]) -> dict[str, Any]:
    """Return the settings of the memory plan of a run's stage 2, with sequences of at most `max_length` tokens.

    Stage 1 is planned if the run has it. Full fine-tuning needs more memory than LoRA, and is planned without it.

    Args:
        runs: all runs.
        run: the planned run.
        arguments: the values of `--config`, for the commands that follow the plan.
    """
    config, finetune = run.config, run.config.finetune
    values = {
        "model": config.model.name,
        "tunings": ["stage1"] * (len(run.training_stages) - 1) + ["lora" if finetune.lora else "full"],
        "gpus": config.gpus if config.gpus > 1 else None,
        "nodes": config.nodes,
        "gpu": runs.shared.gpu,
        "desktop_gib": runs.shared.plan.desktop_gib if runs.shared.gpu else None,
        "host_gib": runs.shared.plan.host_gib,
        "weights_gb": compute_download_gb(config.model) or None,
        "max_length": finetune.max_length,
        "global_batch": finetune.global_batch_size,
        "pretrain_batch": config.pretrain.global_batch_size,
        "lora": finetune.lora and finetune.lora.model_dump(),
        "precision": finetune.precision,
        "compile": finetune.compile,
        "next": _list_next_commands(run, arguments),
        **_count_data(runs, run),
    }
    return {key: value for key, value in values.items() if value is not None}


def _count_data(runs: Runs, run: Run) -> dict[str, Any]:
    """Return the settings that depend on the run's data; none before its dataset is made."""
    dataset = Path(DATASETS_FOLDER, run.dataset.name)
    counts = count_training_rows(runs, run) if (dataset / "summary.json").is_file() else {}
    if not counts:
        return {}
    samples = {stage: count_samples(run.settings[stage], count.rows) for stage, count in counts.items()}
    return {
        "dataset": str(dataset),
        "samples": samples,
        "held_out": read_json(dataset / "summary.json")["evaluation"],
        "notes": _list_notes(run, counts, samples),
    }


def _list_notes(run: Run, counts: Mapping[str, RowCount], samples: Mapping[str, int]) -> list[str]:
    """Return sentences about the samples of each stage, and about stages that add epochs."""
    notes = []
    for stage, count in counts.items():
        uses = samples[stage] / count.rows
        repeated = f", each used about {uses:.3g} times" if uses != 1 else ""
        notes.append(f"{stage}: {samples[stage]:,} samples from {count.describe()}{repeated}")
    notes += [describe_steps(stage, run.settings[stage], count.rows) for stage, count in counts.items()]
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note]


def _list_next_commands(run: Run, arguments: Iterable[str]) -> list[str]:
    """Return the commands that follow the plan: a download if the model is missing, a dry run and the run."""
    model = run.config.model
    needs_download = not model.trained_by_workflow and find_downloads(model, find_missing_models(model))
    fetch = [build_command("fetch", [f"model={model.name}"])] if needs_download else []
    return fetch + [build_command(text, arguments) for text in (f"-n {run.experiment}", run.experiment)]
