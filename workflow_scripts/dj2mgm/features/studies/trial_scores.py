"""The score that ranks the trials of a search: the headline, or the weighted sum of several scores and the cost."""

from collections.abc import Mapping

import numpy as np

from dj2mgm.errors import InputError
from dj2mgm.features.studies.designs import GPU_HOURS
from dj2mgm.features.studies.study_records import BatchRecord, BatchResult, format_run_name
from dj2mgm.records import JsonlSummary
from dj2mgm.reporting.comparison import HeadlineScore, find_headline
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.runs.pages import sum_seconds
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.settings.targets import ReportSection

WEIGHTED_GOAL = HeadlineScore("weighted sum of the goals", "", "goal", 0.0)
Goals = Mapping[str, float]  # weights of scores, by their keys, and of GPU_HOURS


def find_trial_score(experiments: list[ExperimentResults], goals: Goals, share_of_rows: float) -> HeadlineScore:
    """Return the kind of score that ranks trainings on this share of the rows."""
    return WEIGHTED_GOAL if goals else find_headline(experiments, share_of_rows)


def measure_trial(experiment: ExperimentResults, kind: HeadlineScore, goals: Goals, share_of_rows: float) -> float:
    """Return the score of a trial, as the mean over its seeds.

    Args:
        experiment: the trial.
        kind: the score that ranks the trials of its rung.
        goals: weights; none for the headline.
        share_of_rows: share of the rows that the trial is trained on.

    Raises:
        InputError: the trial does not report a score.
    """
    if not goals:
        return _require_mean(experiment, kind.title, kind.group, kind.metric, "report.headline")
    total = 0.0
    for key, weight in goals.items():
        if key == GPU_HOURS:
            total += weight * _measure_gpu_hours(experiment) / share_of_rows
        else:
            headline = ReportSection(headline=key).locate_headline()
            total += weight * _require_mean(experiment, key, headline.group, headline.metric, "design.goals")
    return total


def read_mean(experiment: ExperimentResults, group: str, metric: str) -> float | None:
    """Return the mean of a score over images and seeds; None if it was not measured."""
    estimate = experiment.groups.get(group, {}).get(metric)
    return estimate.mean if estimate else None


def _require_mean(experiment: ExperimentResults, title: str, group: str, metric: str, setting: str) -> float:
    mean = read_mean(experiment, group, metric)
    if mean is None:
        raise InputError(f"{experiment.name} does not report {title}; choose another score in {setting}")
    return mean


def _measure_gpu_hours(experiment: ExperimentResults) -> float:
    """Return the GPU hours of both training stages, all attempts included, as the mean over the seeds."""
    seconds = [sum(record.train_seconds for record in run.records.values()) for run in experiment.runs]
    return float(np.mean(seconds)) * experiment.config.gpus / 3600


def build_batch_result(
    experiments: list[ExperimentResults],
    record: BatchRecord | None,
    goals: Goals,
    reference_summary: JsonlSummary,
) -> BatchResult:
    """Return scores and costs of a batch.

    Args:
        experiments: the finished trials.
        record: the batch (None: batch 0, the experiment that the trials change).
        goals: weights of several goals (none: the headline decides).
        reference_summary: numbers of rows of the baseline's training files.
    """
    finished = {experiment.name: experiment for experiment in experiments}
    fraction = record.fraction if record else 1
    if record:
        run_names = {trial.name: format_run_name(trial.name, fraction) for trial in record.trials}
    else:
        run_names = {name: name for name in finished}
    full_size_trials = run_names if record and fraction == 1 else ()
    return BatchResult(
        scores=_measure_trials(finished, run_names, goals, fraction),
        fewer_rows=[
            name
            for name in full_size_trials
            if name in finished and has_fewer_rows(finished[name].runs[0].jsonl, reference_summary)
        ],
        **_measure_cost(experiments, record),
    )


def _measure_trials(
    finished: dict[str, ExperimentResults], run_names: dict[str, str], goals: Goals, fraction: float
) -> dict[str, float | None]:
    """Return the score of each trial; None for a trial whose training diverged."""
    if not finished:
        return dict.fromkeys(run_names)
    score = find_trial_score([*finished.values()], goals, fraction)
    return {
        name: measure_trial(finished[run], score, goals, fraction) if run in finished else None
        for name, run in run_names.items()
    }


def _measure_cost(experiments: list[ExperimentResults], record: BatchRecord | None) -> dict:
    """Return the number of trainings and their GPU seconds, in total and without training."""
    seconds = [sum_gpu_seconds(experiment) for experiment in experiments]
    fixed_seconds = [sum_gpu_seconds(experiment, without=TRAINING_STAGES) for experiment in experiments]
    runs = len(record.trials) * len(record.seeds) if record else sum(len(side.seeds) for side in experiments)
    return {
        "runs": runs,
        "seconds": sum(filter(None, seconds)) if any(seconds) else None,
        "fixed_seconds": sum(filter(None, fixed_seconds)),
    }


def sum_gpu_seconds(experiment: ExperimentResults, without: tuple[str, ...] = ()) -> float | None:
    """Return the GPU seconds of the stages in an experiment's own folder, without shared stages."""
    stages = [item for run in experiment.runs for item in run.stages.items()]
    folders = {folder for stage, folder in stages if experiment.name in folder.parts and stage not in without}
    seconds = sum_seconds(folders) if folders else 0.0
    return None if seconds is None else seconds * experiment.config.gpus


def has_fewer_rows(own_summary: JsonlSummary, reference_summary: JsonlSummary) -> bool:
    """Return whether the recipe reduced the distinct rows of its own training file, without more rows in the other.

    Args:
        own_summary: numbers of the run.
        reference_summary: numbers of the reference.
    """
    selected = "finetune" if "synthesized" in own_summary.inputs else "pretrain"
    rows = {
        name: [summary.files[name].different_rows for summary in (own_summary, reference_summary)]
        for name in own_summary.files
    }
    return rows[selected][0] < rows[selected][1] and all(
        own_rows <= reference_rows for own_rows, reference_rows in rows.values()
    )
