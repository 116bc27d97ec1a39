"""Changes by fine-tuning: scores of the fine-tuned model compared with those of the model before training."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dj2mgm.evaluation.contrast_verdicts import apply_holm_correction
from dj2mgm.evaluation.contrasts import PairedContrast, PairedValues, contrast_with_base
from dj2mgm.evaluation.intervals import LEVEL
from dj2mgm.evaluation.metric_kinds import BY_TYPE, is_task_metric
from dj2mgm.evaluation.run_scores import estimate_difference
from dj2mgm.reporting.comparison import (
    LOWER_IS_BETTER,
    HeadlineScore,
    find_title,
    format_difference,
    format_interval,
    format_score,
)
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.score_groups import DIFFERENCE, OWN_GROUP, UNTRAINED, name_group, split_group

HELD_OUT_METRICS = ("answer_probability", "answer_log_likelihood", "caption_log_likelihood", "vqa_accuracy")
NO_CHANGE = "no change shown"


@dataclass(frozen=True)
class TrainingChange:
    """A score before and after training, and what the paired difference shows."""

    title: str
    base: str
    base_interval: str
    tuned: str
    tuned_interval: str
    difference: str
    interval: str
    kind: str  # better, worse or same, a class of the style sheet
    word: str


def compute_change_by_training(
    experiment: ExperimentResults, group: str, metric: str, base_model: str = UNTRAINED
) -> PairedContrast | None:
    """Return the difference of the fine-tuned model from an earlier one, paired by image.

    None if a score was not measured.
    """
    base_group = name_group(base_model, split_group(group)[1])
    pairs = [
        (run.groups.get(group, {}).get(metric), run.groups.get(base_group, {}).get(metric)) for run in experiment.scores
    ]
    if any(None in pair for pair in pairs):
        return None
    changes = [tuned - base for tuned, base in pairs]
    values = PairedValues(tuple(experiment.seeds), np.stack([change.sums for change in changes]), changes[0].counts)
    return contrast_with_base(values)


def judge_training_changes(
    experiment: ExperimentResults, headline: HeadlineScore
) -> dict[tuple[str, str], TrainingChange]:
    """Return the changes of all scores that were measured before and after training, by group and metric.

    The headline is the first. The p-values of the rows are corrected for their number (Holm 1979). Whether more is
    better is not known for metrics of lmms-eval.
    """
    keys = dict.fromkeys(
        [(headline.group, headline.metric), *((OWN_GROUP, metric) for metric in _list_metrics(experiment))]
    )
    measured = {key: contrast for key in keys if (contrast := compute_change_by_training(experiment, *key))}
    p_values = apply_holm_correction(
        [float(contrast.compute_p_value()) if contrast.images > 1 else 1.0 for contrast in measured.values()]
    )
    changes = {}
    for (key, contrast), p_value in zip(measured.items(), p_values, strict=True):
        group, metric = key
        before, after = (
            experiment.groups[name][metric] for name in (name_group(UNTRAINED, split_group(group)[1]), group)
        )
        difference = estimate_difference(contrast, group, metric)
        show = format_difference if split_group(group)[1] == DIFFERENCE else format_score
        changes[key] = TrainingChange(
            find_title(headline.title if key == (headline.group, headline.metric) else metric),
            show(metric, before.mean),
            format_interval(metric, before, show),
            show(metric, after.mean),
            format_interval(metric, after, show),
            format_difference(metric, difference.mean),
            format_interval(metric, difference, format_difference),
            *_judge(metric, difference.mean, p_value),
        )
    return changes


def _judge(metric: str, difference: float, p_value: float) -> tuple[str, str]:
    """Return the kind of a change and the word for it."""
    if p_value > LEVEL:
        return "same", NO_CHANGE
    if is_task_metric(metric):
        return "same", "rose" if difference > 0 else "fell"
    is_better = (difference > 0) != (metric in LOWER_IS_BETTER)
    return ("better", "gained") if is_better else ("worse", "forgot")


def _list_metrics(experiment: ExperimentResults) -> Iterator[str]:
    """Yield the scores of held-out data, the scores by question type, and the scores of benchmarks."""
    measured = experiment.groups.get(OWN_GROUP, {})
    yield from (metric for metric in HELD_OUT_METRICS if metric in measured)
    yield from (metric for metric in measured if metric.startswith(BY_TYPE) or is_task_metric(metric))
