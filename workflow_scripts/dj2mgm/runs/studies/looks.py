"""Looks of `snakemake decide`: their seeds and files, and the checks of its settings."""

from collections.abc import Callable
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER as DATASETS
from dj2mgm.errors import InputError
from dj2mgm.records.look_records import MIN_SEEDS, LookRecord, needs_another_seed
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.pages import build_page_settings, list_page_files
from dj2mgm.runs.run import Run
from dj2mgm.runs.studies.seed_times import format_hours, sum_measured_seconds
from dj2mgm.runs.studies.unused_seeds import choose_unused_seeds
from dj2mgm.settings.targets import ReportSection
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, read_jsonl

EXAMPLE_COMMAND = "`snakemake decide --config experiment=dj_synth`"


def choose_seeds(runs: Runs, experiment: str, number: int) -> list[int]:
    """Return the seeds of both sides: those of the configuration, then the smallest unused numbers."""
    configured = runs.experiments.configs[experiment].seeds
    return [*configured, *choose_unused_seeds(configured, max(0, number - len(configured)))][:number]


def build_look_settings(runs: Runs, experiment: str, number: int) -> dict:
    """Return the settings of the look after this number of seeds; raises as `build_page_settings` does."""
    return build_page_settings(runs, [REFERENCE, experiment], choose_seeds(runs, experiment, number))


def list_look_inputs(runs: Runs, experiment: str, number: int) -> list[str]:
    """Return the files of both sides that a look reads."""
    return list_page_files(runs, [REFERENCE, experiment], choose_seeds(runs, experiment, number))


def locate_decision_folder(runs: Runs, experiment: str) -> str:
    """Return the folder of an experiment's decision, below results/."""
    return f"{runs.results_prefix}{experiment}/decide"


def list_looks(runs: Runs, file_after: Callable[[int], str]) -> list[str]:
    """Return the files of all looks, up to the one that decides or that spends the budget.

    Args:
        file_after: function that returns the file of the look after a number of seeds, and raises Snakemake's exception
            if it was not taken yet.
    """
    budget, files = runs.shared.decide, []
    for number in range(MIN_SEEDS, budget.seeds + 1):
        files.append(file_after(number))
        if not needs_another_seed(load_settings(LookRecord, files[-1]), budget):
            break
    return files


def check_decidable(runs: Runs) -> str:
    """Return the experiment to decide about.

    Raises:
        InputError: it is not named, is the reference or not valid, the budget is smaller than its number of seeds, or
            no run reports the headline.
    """
    if not runs.shared.experiment:
        raise InputError(f"decide: the key experiment is missing; name one, as in {EXAMPLE_COMMAND}")
    experiment, budget = runs.experiments.get_requested("decide", REFERENCE), runs.shared.decide
    if experiment == REFERENCE:
        raise InputError(
            f"decide: experiments are compared with {REFERENCE}; name another one, as in {EXAMPLE_COMMAND}"
        )
    runs.experiments.require(experiment)
    configured_seeds = runs.experiments.configs[experiment].seeds
    if budget.seeds < len(configured_seeds):
        raise InputError(
            f"decide.seeds: {budget.seeds} is less than the {len(configured_seeds)} seeds of the configuration; raise "
            f"it to at least {len(configured_seeds)}"
        )
    _check_hours(runs, experiment)
    for name in (REFERENCE, experiment):
        check_headline(runs, name)
    return experiment


def _check_hours(runs: Runs, experiment: str) -> None:
    """Refuse fewer hours than the first look takes, if a seed of both sides was measured."""
    hours = runs.shared.decide.hours
    if hours is None or any(Path("results", locate_decision_folder(runs, experiment)).glob("seeds-*/look.yaml")):
        return
    first_runs = [runs.get(name, choose_seeds(runs, experiment, 1)[0]) for name in (REFERENCE, experiment)]
    stage_folders = [{stage: runs.find_stage_folder(run, stage) for stage in run.settings} for run in first_runs]
    finished = all(Path(stages["evaluate_vqa"], "metrics.json").is_file() for stages in stage_folders)
    seconds = sum_measured_seconds(stage_folders) if finished else None
    if seconds and MIN_SEEDS * seconds > 3600 * hours:
        raise InputError(
            f"decide.hours: {hours:g} is too little for {MIN_SEEDS} seeds; the first one of both sides took "
            f"{format_hours(seconds / 3600)} hours, so raise it to at least "
            f"{format_hours(MIN_SEEDS * seconds / 3600)}"
        )


def check_headline(runs: Runs, experiment: str) -> None:
    """Refuse a headline that neither the experiment's finished run nor, without one, its held-out data can report."""
    check_reported(runs, experiment, None, "report.headline")


def check_reported(runs: Runs, experiment: str, score: str | None, setting: str) -> None:
    """Refuse a score that an experiment's finished run or, without one, its held-out data cannot report.

    Args:
        runs: all runs.
        experiment: name of the experiment.
        score: key of the score; None for the headline, which has a fallback for data without questions.
        setting: name of the setting, which begins the message.
    """
    run = runs.first_seed(experiment)
    report = ReportSection(headline=score) if score else run.config.report
    folders = {
        stage: Path(runs.find_stage_folder(run, stage)) for stage in ("generate", "evaluate_clip", "evaluate_vqa")
    }
    files = [folders[stage] / "metrics.json" for stage in ("evaluate_clip", "evaluate_vqa")]
    if all(file.is_file() for file in (*files, folders["generate"] / "likelihoods.jsonl")):
        clip, vqa = map(read_json, files)
        headline = report.locate_headline(bool(score or vqa["questions"]))
        key = headline.key
        reported = any(headline.metric in metrics["groups"].get(headline.group, {}) for metrics in (clip, vqa))
    else:  # it has not run, or runs again
        key = report.headline
        reported = key != "attribute_accuracy" or _has_objects(run)
    if not reported:
        raise InputError(
            f"{setting}: {key} is not reported by {experiment}, whose held-out data do not support it; choose "
            "another score, such as caption_log_likelihood"
        )


def _has_objects(run: Run) -> bool:
    """Return whether the objects in held-out images are known."""
    settings, generated_file = run.dataset.settings, Path(DATASETS, run.dataset.name, "evaluation.jsonl")
    if settings.is_rendered:
        return True
    evaluation = getattr(settings, "evaluation", None)
    file = generated_file if generated_file.is_file() else evaluation and evaluation.file
    return bool(file) and any(row.get("objects") for row in read_jsonl(file))
