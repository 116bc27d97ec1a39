"""Signs that a model has learned nothing, so that its scores say nothing about data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from dj2mgm.evaluation.contrasts import contrast_with_reference
from dj2mgm.evaluation.groups import estimate_metric
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.paired_values import PairedValues
from dj2mgm.records.training_record import TrainingRecord
from dj2mgm.reporting.comparison import format_score
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.reporting.verdicts.training_changes import HELD_OUT_METRICS
from dj2mgm.score_groups import FINETUNED, GAIN_GROUP, OWN, SHUFFLED, UNTRAINED, name_group
from dj2mgm.settings.configuration import ExperimentOnlyKeys

MIN_STEPS = 20  # optimizer steps of a training stage; fewer change little
RISE_LEVEL = 0.001  # of the test whether a training's loss rose; a page has six trainings or more
CHANGE_LEVEL = 0.01  # of the tests whether a training changed its loss or a score


@dataclass(frozen=True)
class LearningFault:
    """A sign that a model has learned nothing, and its remedy, as sentences without a period."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}."


def find_learning_faults(experiment: ExperimentResults, metric: str, title: str) -> list[LearningFault]:
    """Return why the experiment's models have learned nothing; empty if they have learned.

    Args:
        metric: headline metric, which is compared between own and shuffled images.
        title: name of the metric in sentences.
    """
    training_faults = list_training_faults(experiment)
    # a rising loss is a change, too
    unchanged = [] if training_faults else _find_unchanged_stages(experiment)
    return [*_find_image_faults(experiment, metric, title), *training_faults, *unchanged]


def describe_faults(unlearned: dict[str, list[LearningFault]]) -> list[str]:
    """Return a sentence for each reason why models learned nothing, with the names of its experiments.

    A reason that applies to all experiments is stated without names. If its figures, which are in parentheses, differ
    between experiments, the names precede each figure.

    Args:
        unlearned: the signs that models have learned nothing, by experiment.
    """
    names_by_sign: dict[str, dict[str, list[str]]] = {}  # names of experiments, by sign and by figures
    for name, faults in unlearned.items():
        for fault in faults:
            sign, _, figures = fault.reason.partition(" (")
            names_by_sign.setdefault(sign, {}).setdefault(figures.removesuffix(")"), []).append(name)
    sentences = []
    for sign, by_figures in names_by_sign.items():
        names = list(dict.fromkeys(name for group in by_figures.values() for name in group))
        same_figures = len(by_figures) == 1 or len(names) == 1
        figures = "; ".join(
            text if same_figures else f"{join_words(group)}: {text}" for text, group in by_figures.items() if text
        )
        prefix = "" if len(names) == len(unlearned) else f"{join_words(names)}: "
        sentences.append(f"{prefix}{sign}{f' ({figures})' if figures else ''}.")
    return sentences


def list_training_faults(experiment: ExperimentResults) -> list[LearningFault]:
    """Return why the trainings of the experiment's models taught nothing, which more seeds do not change."""
    return list(dict.fromkeys(fault for run in experiment.runs for fault in _find_training_faults(experiment, run)))


def estimate_image_gain(experiment: ExperimentResults, metric: str) -> Estimate | None:
    """Return the trained models' gain in score with own over shuffled images; None if it was not measured.

    The interval covers the choice of images only. Whether these models have learned does not depend on other seeds.
    """
    gains = [run.groups.get(GAIN_GROUP, {}).get(metric) for run in experiment.scores]
    if None in gains:
        return None
    sums = np.mean([gain.sums for gain in gains], axis=0, keepdims=True)
    return estimate_metric(metric, sums, gains[0].counts, paired=True)


def _find_image_faults(experiment: ExperimentResults, metric: str, title: str) -> Iterator[LearningFault]:
    gain = estimate_image_gain(experiment, metric)
    if gain and gain.low is not None and gain.low <= 0:
        own_score, shuffled_score = (
            format_score(metric, experiment.groups[name_group(FINETUNED, images)][metric].mean)
            for images in (OWN, SHUFFLED)
        )
        remedy = advise_other_model(experiment) or "Train longer, and check that images and texts belong together"
        yield LearningFault(
            "The model does not measurably score better with the right images than with shuffled ones "
            f"({title} {own_score} and {shuffled_score})",
            remedy,
        )


def advise_other_model(experiment: ExperimentResults) -> str:
    """Return the remedy for a tiny model, made for rendered scenes, that was trained on a user's data; else ""."""
    tiny = (experiment.config.model.model_extra or {}).get("foundation")
    if not tiny or experiment.config.dataset == ExperimentOnlyKeys.model_fields["dataset"].default:
        return ""
    return f"The model {experiment.config.model.name} is made for rendered scenes; on photos, train another one"


def _find_training_faults(experiment: ExperimentResults, run: RunResults) -> Iterator[LearningFault]:
    """Yield a fault for too few steps that changed weights, and for a loss that rose, by stage."""
    for stage, record in run.records.items():
        steps = _count_effective_steps(record, run.steps[stage])
        if steps < MIN_STEPS:
            has_limit = getattr(experiment.config, stage).max_steps
            keys = f"{stage}.min_steps or {stage}.epochs, or lower {stage}.global_batch_size"
            yield LearningFault(
                f"The stage {stage} changed weights in {steps} optimizer steps only; at least {MIN_STEPS} are needed",
                f"Raise {f'{stage}.max_steps' if has_limit else keys}",
            )
        trend = compute_loss_trend(list_losses(run, stage))
        if trend.p_rise <= RISE_LEVEL:
            yield LearningFault(
                f"The loss of the stage {stage} rose ({trend.first:.3f} over the first third of the logged steps, "
                f"{trend.last:.3f} over the last third)",
                f"Train longer, or change {stage}.learning_rate",
            )


@dataclass(frozen=True)
class LossTrend:
    """Mean losses of the first and last third of the logged steps, with one-sided p-values of a constant loss."""

    first: float
    last: float
    p_fall: float
    p_rise: float


def compute_loss_trend(losses: Sequence[float]) -> LossTrend:
    """Compare the first with the last third of the logged losses (Cox and Stuart 1955, Biometrika 42, 80).

    The noise is estimated from successive differences, which hardly contain the trend (von Neumann 1941, Annals of
    Mathematical Statistics 12, 367): half of their mean square is the variance, with 2 (n − 1)² / (3 n − 4) degrees of
    freedom. The difference divided by its standard error is Student's t. Fewer than three losses show no trend.
    """
    number = len(losses)
    if number < 3:
        return LossTrend(0.0, 0.0, 1.0, 1.0)
    third = number // 3
    first, last = float(np.mean(losses[:third])), float(np.mean(losses[-third:]))
    error = np.sqrt(np.mean(np.diff(losses) ** 2) / third)
    if not error > 0:
        return LossTrend(first, last, 1.0, 1.0)
    t, degrees_of_freedom = (first - last) / error, 2 * (number - 1) ** 2 / (3 * number - 4)
    return LossTrend(first, last, float(stdtr(degrees_of_freedom, -t)), float(stdtr(degrees_of_freedom, t)))


def list_losses(run: RunResults, stage: str) -> list[float]:
    """Return the logged losses of a training stage."""
    return [row["loss"] for row in run.steps[stage] if "loss" in row]


def _find_unchanged_stages(experiment: ExperimentResults) -> Iterator[LearningFault]:
    """Yield a fault for each stage in which no loss fell and no score of held-out data changed beyond their noise.

    A loss that does not fall measurably is no fault by itself, because a small fall may be hidden by the noise of the
    batches. A stage without scores before and after it has no fault. Each p-value is corrected for the number of runs
    or scores (Bonferroni).
    """
    before = UNTRAINED
    for stage in experiment.runs[0].records:
        changes = _test_score_changes(experiment, before, stage)
        falls = [compute_loss_trend(list_losses(run, stage)).p_fall for run in experiment.runs]
        if changes and all(min(p_values) * len(p_values) > CHANGE_LEVEL for p_values in (changes, falls)):
            yield LearningFault(
                f"The stage {stage} changed neither its loss nor a score of held-out data by more than noise",
                f"Train longer, or change {stage}.learning_rate",
            )
        before = stage


def _test_score_changes(experiment: ExperimentResults, before: str, after: str) -> list[float]:
    """Return the p-value of the change of each held-out score between two models, over images."""
    groups, p_values = [name_group(model, OWN) for model in (before, after)], []
    for metric in HELD_OUT_METRICS:
        pairs = [[run.groups.get(group, {}).get(metric) for group in groups] for run in experiment.scores]
        if any(None in pair for pair in pairs):
            continue
        changes = [after_values - before_values for before_values, after_values in pairs]
        sums = np.mean([change.sums for change in changes], axis=0, keepdims=True)
        [contrast] = contrast_with_reference([PairedValues((0,), sums, changes[0].counts)])
        if contrast.images > 1:
            p_values.append(float(contrast.compute_p_value()))
    return p_values


def _count_effective_steps(record: TrainingRecord, rows: list[dict]) -> int:
    """Return the number of steps that changed weights; the first one of a warm-up has a learning rate of zero."""
    return record.steps - (rows[0]["step"] == 1 and rows[0].get("learning_rate") == 0)
