"""Changes of scores by training, and signs that a model has learned nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from dj2mgm.evaluation.contrast_verdicts import apply_holm_correction
from dj2mgm.evaluation.contrasts import PairedContrast, PairedValues, contrast_with_base
from dj2mgm.evaluation.groups import BY_TYPE, estimate_metric, is_task_metric
from dj2mgm.evaluation.intervals import LEVEL, Estimate
from dj2mgm.evaluation.run_scores import estimate_difference
from dj2mgm.records import TrainingRecord
from dj2mgm.reporting.comparison import (
    LOWER_IS_BETTER,
    HeadlineScore,
    find_title,
    format_difference,
    format_interval,
    format_score,
)
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.score_groups import (
    DIFFERENCE,
    FINETUNED,
    GAIN_GROUP,
    OWN,
    OWN_GROUP,
    SHUFFLED,
    UNTRAINED,
    name_group,
    split_group,
)
from dj2mgm.settings.configuration import ExperimentOnlyKeys

MIN_STEPS = 20  # optimizer steps of a training stage; fewer change little
RISE_LEVEL = 0.0001  # of the test whether a training's loss rose; a page has six trainings or more, and `decide` ends
LOSS_BLOCKS = 10  # of successive steps, whose mean losses hardly depend on each other
LIKELIHOODS = ("answer_probability", "answer_log_likelihood")
ROUNDING = 0.01  # of a probability or log-likelihood that bfloat16 models compute, on an image
HELD_OUT_METRICS = ("answer_probability", "answer_log_likelihood", "caption_log_likelihood", "vqa_accuracy")
NO_CHANGE = "no change shown"


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
    faults = [*_find_image_faults(experiment, metric, title), *list_training_faults(experiment)]
    return [*faults, *dict.fromkeys(fault for run in experiment.runs for fault in _find_unchanged(experiment, run))]


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


def write_warning(unlearned: dict[str, list[LearningFault]]) -> str:
    """Return the warning about all models that learned nothing, with each reason and each remedy once."""
    verb = "has" if len(unlearned) == 1 else "have"
    remedies = dict.fromkeys(f"{fault.remedy}." for faults in unlearned.values() for fault in faults)
    lead = f"{join_words([*unlearned])} {verb} learned nothing measurable."
    return " ".join([lead, *describe_faults(unlearned), *remedies])


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
        losses = [row["loss"] for row in run.steps[stage] if "loss" in row]
        if compute_rise_p_value(losses) <= RISE_LEVEL:
            third = len(losses) // 3
            yield LearningFault(
                f"The loss of the stage {stage} rose ({np.mean(losses[:third]):.3f} over the first third of the logged "
                f"steps, {np.mean(losses[-third:]):.3f} over the last third)",
                f"Train longer, or change {stage}.learning_rate",
            )


def compute_rise_p_value(losses: Sequence[float]) -> float:
    """Return the one-sided p-value of a constant loss: small if the logged losses rose.

    Successive losses may be correlated, so a line is fitted to the means of blocks of steps. Its slope divided by the
    standard error is Student's t. Fewer than three losses, or equal ones, show no rise.
    """
    number = min(LOSS_BLOCKS, len(losses))
    if number < 3:
        return 1.0
    means = np.array([block.mean() for block in np.array_split(np.asarray(losses, dtype=float), number)])
    times = np.arange(number) - (number - 1) / 2
    slope = means @ times / (times @ times)
    residuals = means - means.mean() - slope * times
    error = np.sqrt(residuals @ residuals / (number - 2) / (times @ times))
    return float(stdtr(number - 2, -slope / error)) if error > 0 else float(not slope > 0)


def _find_unchanged(experiment: ExperimentResults, run: RunResults) -> Iterator[LearningFault]:
    """Yield a fault for each stage that changed no likelihood of held-out data, on any image, beyond rounding.

    A stage without likelihoods before and after it has no fault. Those of captions count only if both models have the
    same prompt.
    """
    templates = experiment.config.model.model_extra or {}
    same_prompt = templates.get("pretrain_template") == templates.get("template")
    metrics = (*LIKELIHOODS, "caption_log_likelihood") if same_prompt else LIKELIHOODS
    before = UNTRAINED
    for stage in run.records:
        groups = [run.scores.groups.get(name_group(model, OWN), {}) for model in (before, stage)]
        changes = [groups[1][metric] - groups[0][metric] for metric in metrics if all(metric in g for g in groups)]
        if any(change.ids.size for change in changes) and all(
            np.all(np.abs(change.sums) <= ROUNDING * change.counts) for change in changes
        ):
            yield LearningFault(
                f"The stage {stage} did not change the model: all likelihoods of held-out data are the same",
                f"Raise {stage}.learning_rate, or train longer",
            )
        before = stage


def _count_effective_steps(record: TrainingRecord, rows: list[dict]) -> int:
    """Return the number of steps that changed weights; the first one of a warm-up has a learning rate of zero."""
    return record.steps - (rows[0]["step"] == 1 and rows[0].get("learning_rate") == 0)


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
