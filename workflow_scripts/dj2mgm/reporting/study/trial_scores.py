"""The score that ranks the trials of a search: the headline, or the weighted sum of several scores and the cost."""

from collections.abc import Mapping

import numpy as np

from dj2mgm.errors import InputError
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.verdicts.headline_scores import HeadlineScore, find_headline
from dj2mgm.settings.study_files import GPU_HOURS
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
