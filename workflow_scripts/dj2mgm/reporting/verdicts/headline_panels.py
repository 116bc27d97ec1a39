"""Headline metrics of each experiment, and differences from the reference with their verdicts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dj2mgm.evaluation.groups import SECOND_JUDGE_PREFIX, is_share
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import GroupEstimates
from dj2mgm.reporting.charts import Scale, Tick, list_round_values
from dj2mgm.reporting.comparison import (
    HEADLINES,
    JUDGED_METRICS,
    classify_difference,
    describe_obstacles,
    find_obstacle,
    find_title,
    format_difference,
    format_interval,
    format_score,
    lower_title,
)
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.score_groups import FINETUNED, OWN, REFERENCE_CAPTIONS, SHUFFLED, name_group

TRAINING_NAMES = {"pretrain": "pretraining", "finetune": "fine-tuning"}


@dataclass(frozen=True)
class ScoreMark:
    """A mean with its 95 % interval; positions are in percent of an axis."""

    at: float
    low: float
    high: float
    seeds: list[float]  # positions of the means of single seeds; empty if they are not shown
    text: str
    interval: str


@dataclass(frozen=True)
class ScoreLevel:
    """Position of an experiment's score on the axis of its panel."""

    experiment: str
    mark: ScoreMark
    shuffled: float | None  # position of the score with shuffled images
    shuffled_text: str


@dataclass(frozen=True)
class ScoreDifference:
    """A difference of one experiment from the reference."""

    experiment: str
    mark: ScoreMark
    verdict: str  # better, worse or same


@dataclass(frozen=True)
class StageScores:
    """Scores and differences after one training stage."""

    stage: str  # pretraining or fine-tuning
    levels: list[ScoreLevel]
    differences: list[ScoreDifference]


@dataclass(frozen=True)
class MetricPanel:
    """The chart of one headline metric."""

    title: str
    meaning: str
    models: list[StageScores]
    level_ticks: list[Tick]
    ceiling: float | None  # position of the reference captions' score; None if it differs between experiments
    difference_ticks: list[Tick]
    zero: float
    unit: str  # of differences
    judge: int | None  # the judge, 0 or 1, if this is the first panel with its scores
    scale: str  # how to read a judge's score; empty for other scores


@dataclass(frozen=True)
class DifferenceSummary:
    """Verdicts after one training stage: titles of metrics, with the difference if one is shown."""

    stage: str
    seeds: int  # number of seeds of the differences
    better: list[str]
    worse: list[str]
    same: list[str]


@dataclass(frozen=True)
class MetricVerdicts:
    """Verdicts on one experiment, compared with the reference."""

    experiment: str
    description: str
    sentences: list[DifferenceSummary]
    obstacles: list[str]  # sentences on metrics that are not compared


def build_metric_verdicts(
    experiments: list[ExperimentResults], differences: dict[str, GroupEstimates]
) -> list[MetricVerdicts]:
    """Return one verdict for each experiment in `differences` from the reference, the first experiment."""
    return [
        MetricVerdicts(
            experiment.name,
            experiment.description,
            list(summarize_differences(differences[experiment.name])),
            describe_obstacles(experiment, experiments[0]),
        )
        for experiment in experiments
        if experiment.name in differences
    ]


def summarize_differences(differences: GroupEstimates) -> Iterator[DifferenceSummary]:
    """Yield the shown scores that are better, worse and the same after each training stage."""
    for model, stage in TRAINING_NAMES.items():
        estimates = differences.get(name_group(model, OWN), {})
        titles_by_kind: dict[str, list[str]] = {"better": [], "worse": [], "same": []}
        seeds = max((estimate.seeds for estimate in estimates.values()), default=0)
        for metric in HEADLINES:
            if metric in estimates:
                kind = classify_difference(metric, estimates[metric]).css_class
                words = lower_title(metric)
                titles_by_kind[kind].append(
                    words if kind == "same" else f"{words} ({_format_unbroken(metric, estimates[metric])})"
                )
        if any(titles_by_kind.values()):
            yield DifferenceSummary(stage, seeds, **titles_by_kind)


def _format_unbroken(metric: str, difference: Estimate) -> str:
    return format_difference(metric, difference.mean).replace(" ", "\u00a0")


def build_headline_panels(
    experiments: list[ExperimentResults], differences: dict[str, GroupEstimates]
) -> list[MetricPanel]:
    """Return one panel for each headline metric that any experiment measured. Axes of scores start at 0."""
    panels = []
    for metric, meaning in HEADLINES.items():
        scale, difference_scale = _find_level_scale(experiments, metric), _find_difference_scale(differences, metric)
        models = []
        for model, stage in TRAINING_NAMES.items():
            levels = list(_build_levels(experiments, model, metric, scale))
            if levels:
                models.append(
                    StageScores(
                        stage,
                        levels,
                        list(_build_differences(experiments, differences, model, metric, difference_scale)),
                    )
                )
        if models:
            comparable = not find_obstacle(metric, *experiments)
            ceiling = experiments[0].groups.get(REFERENCE_CAPTIONS, {}).get(metric) if comparable else None
            factor = 100 if is_share(metric) else 1
            own_metric = metric.removeprefix(SECOND_JUDGE_PREFIX)
            panels.append(
                MetricPanel(
                    find_title(metric),
                    meaning,
                    models,
                    scale.choose_ticks(5, factor),
                    scale.locate(ceiling.mean) if ceiling else None,
                    difference_scale.choose_ticks(3, factor, signed=True),
                    difference_scale.locate(0),
                    "percentage points" if is_share(metric) else "",
                    int(metric.startswith(SECOND_JUDGE_PREFIX)) if own_metric == JUDGED_METRICS[0] else None,
                    _describe_clip_scale(experiments, metric) if own_metric in JUDGED_METRICS else "",
                )
            )
    return panels


def _describe_clip_scale(experiments: list[ExperimentResults], metric: str) -> str:
    """Return the range of a judge's score, its usual values, and the distance that a difference is compared with."""
    text = (
        "Harmonic mean of CLIPScore and the cosine to the closest reference caption, 0 to 1.43."
        if "ref_clip_score" in metric
        else "2.5 times the cosine, 0 to 2.5. Each judge has a level of its own."
    )
    groups = [name_group(FINETUNED, SHUFFLED), REFERENCE_CAPTIONS]
    scores = [experiments[0].groups.get(group, {}).get(metric) for group in groups]
    if None in scores:
        return text
    shuffled, reference = (format_score(metric, score.mean) for score in scores)
    advice = " Compare differences with this distance." if len(experiments) > 1 else ""
    return f"{text} Here captions of other images get {shuffled}, and the reference captions {reference}.{advice}"


def _find_level_scale(experiments: list[ExperimentResults], metric: str) -> Scale:
    if is_share(metric):
        return Scale(0, 1)
    estimates = [groups[metric] for e in experiments for groups in e.groups.values() if metric in groups]
    high = 1.05 * max((estimate.ends[1] for estimate in estimates), default=0) or 1
    values, _ = list_round_values(0, high, 4)  # one fewer than the axis has, for a tick beyond the reference line
    return Scale(0, values[1] * math.ceil(high / values[1]))


def _find_difference_scale(differences: dict[str, GroupEstimates], metric: str) -> Scale:
    values = [0.0]
    for estimates in differences.values():
        for model in TRAINING_NAMES:
            if estimate := estimates.get(name_group(model, OWN), {}).get(metric):
                values += estimate.ends
    margin = 0.15 * (max(values) - min(values)) or 0.01
    return Scale(min(values) - margin, max(values) + margin)


def _build_levels(experiments: list[ExperimentResults], model: str, metric: str, scale: Scale) -> Iterator[ScoreLevel]:
    for experiment in experiments:
        estimate = experiment.groups.get(name_group(model, OWN), {}).get(metric)
        if estimate:
            texts = format_score(metric, estimate.mean), format_interval(metric, estimate)
            shuffled = experiment.groups.get(name_group(model, SHUFFLED), {}).get(metric)
            position, text = (
                (scale.locate(shuffled.mean), format_score(metric, shuffled.mean)) if shuffled else (None, "")
            )
            yield ScoreLevel(experiment.name, _build_mark(scale, estimate, [], *texts), position, text)


def _build_differences(
    experiments: list[ExperimentResults], differences: dict[str, GroupEstimates], model: str, metric: str, scale: Scale
) -> Iterator[ScoreDifference]:
    """Yield the difference of each experiment after a training stage, with the differences of single seeds."""
    reference = {run.seed: run.scores for run in experiments[0].runs}
    group = name_group(model, OWN)
    for experiment in experiments:
        estimate = differences.get(experiment.name, {}).get(group, {}).get(metric)
        if estimate:
            pairs = [(run.scores, reference[run.seed]) for run in experiment.runs if run.seed in reference]
            seeds = [
                (own_scores.groups[group][metric] - reference_scores.groups[group][metric]).mean
                for own_scores, reference_scores in pairs
            ]
            text = format_difference(metric, estimate.mean).removesuffix(" points")
            mark = _build_mark(scale, estimate, seeds, text, format_interval(metric, estimate, format_difference))
            yield ScoreDifference(experiment.name, mark, classify_difference(metric, estimate).css_class)


def _build_mark(scale: Scale, estimate: Estimate, seeds: list[float], text: str, interval_text: str) -> ScoreMark:
    positions = [scale.locate(value) for value in (estimate.mean, *estimate.ends)]
    return ScoreMark(
        *positions, [scale.locate(value) for value in seeds] if len(seeds) > 1 else [], text, interval_text
    )


@dataclass(frozen=True)
class Coverage:
    """Share of simulated studies in which the 95 % interval contains the true share of right answers.

    The true share is 10 %; the coverage is the same for 90 %.
    """

    questions: int  # per image: from 1 to this number
    images: int
    by_seeds: dict[int, int]  # coverage in percent, by number of seeds


# Simulated by tests/unit/evaluation/test_intervals.py, which also simulates the cases with a coverage of at least 94 %.
LOW_COVERAGE = [
    Coverage(1, 10, {1: 65, 2: 86, 3: 93, 5: 92}),
    Coverage(1, 20, {1: 88, 2: 97, 3: 97, 5: 97}),
    Coverage(1, 100, {1: 93, 2: 99, 3: 99, 5: 98}),
    Coverage(5, 10, {1: 84, 2: 95, 3: 94, 5: 93}),
    Coverage(5, 20, {1: 87, 2: 98, 3: 97, 5: 95}),
    Coverage(5, 100, {1: 93, 2: 99, 3: 98, 5: 98}),
]
