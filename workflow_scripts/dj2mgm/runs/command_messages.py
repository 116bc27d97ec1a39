"""Messages of a command: risks at its start, and the trainings, time and results that a dry run would have."""

import csv
import os
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from statistics import median

from dj2mgm.cli.command_line import escape_control
from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import pluralize
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.job_checks import PlannedJob
from dj2mgm.runs.row_counts import count_training_rows
from dj2mgm.runs.run import Run
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.settings.batch_sizes import find_steps
from dj2mgm.settings.configuration import TARGETS_BY_KEY

MAX_TRAININGS = 6  # trainings listed; a study may have hundreds
WIDTH = 80  # columns
SUFFIX = ".benchmark.tsv"
SHARED_FOLDERS = {"datasets", "foundation", "models"}
LARGE_FOLDERS = {"images", "checkpoints", "captions", "published"}  # without benchmark files


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
    """Return lines of at most 80 columns about the jobs of a dry run; none if nothing would run.

    Args:
        runs: all runs.
        jobs: the jobs that would run.
        targets: the jobs that the command line names.
        missing: sentences about models that are still to be fetched; they come first.
        config_arguments: the command line's values of --config.
    """
    jobs = list(jobs)
    if not jobs:
        return []
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
    trainings.reverse()  # the jobs come from the targets backwards
    count = f"{pluralize(len(stages), 'stage')} would run"
    lines = ["", *(line for text in missing for line in _wrap(f"First: {text}."))]
    lines.append(f"Summary: {count}, {len(trainings)} of them a training.")
    planned_folders = {Path(file).parent for job in stages for file in job.files}
    lines += [f"  {_describe_training(runs, *training, planned_folders)}" for training in trainings[:MAX_TRAININGS]]
    if len(trainings) > MAX_TRAININGS:
        lines.append(f"  … and {len(trainings) - MAX_TRAININGS} more trainings")
    lines += _wrap(f"Time: {_estimate_time(stages, build_command('plan', config_arguments))}.")
    results = [Path(file) for target in targets for file in target.files if file.startswith("results/")]
    pages = [file for file in results if file.suffix == ".html"]
    results = pages or [file for file in results if file.suffix != ".yaml"]  # settings are read, not made for users
    lines += [f"Result: {file}" for file in results[:3]]
    return [*lines, hint]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _describe_training(runs: Runs, run: Run, stage: str, planned_folders: set[Path]) -> str:
    """Return the rows and steps of a training, as far as they are known before the planned jobs have run."""
    label = f"{stage} of {run.name}"
    count = count_training_rows(runs, run, planned_folders).get(stage)
    if not count:
        return f"{label}: the number of rows is not known yet"
    return f"{label}: {count.describe()}, {pluralize(find_steps(run.settings[stage], count.rows), 'step')}"


def _estimate_time(stages: list[PlannedJob], plan: str) -> str:
    """Return the sum of the times that the same rules took before with the same dataset and model."""
    seconds = _read_seconds_by_rule({"/".join(job.run.split("/")[:2]) for job in stages if job.run})
    measured_times = [median(seconds[job.rule]) for job in stages if job.rule in seconds]
    trainings = [job for job in stages if job.rule.startswith(TRAINING_STAGES)]
    if any(job.rule not in seconds for job in trainings):
        return f"trainings have not run here yet; `{plan}` predicts it"
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
                with open(Path(folder, name), encoding="utf-8", newline="") as rows:
                    times = [float(row["s"]) for row in csv.DictReader(rows, delimiter="\t") if row.get("s")]
                seconds.setdefault(name.removesuffix(SUFFIX), []).extend(times)
    return {rule: times for rule, times in seconds.items() if times}
