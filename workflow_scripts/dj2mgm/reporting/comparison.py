"""Scores of all experiments: the rows of comparison.csv and the tables of the report.

Differences exist only for metrics that were measured on the same held-out data and by the same judge. The pages state
why other metrics are not compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dj2mgm.evaluation.groups import BY_TYPE, SECOND_JUDGE_PREFIX, is_share, is_task_metric
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import (
    GroupEstimates,
    RunScores,
    estimate_differences,
    estimate_paired_difference,
    pair_values,
    select_metrics,
)
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import Cell, Table, TableRow, format_number, join_words
from dj2mgm.score_groups import (
    DIFFERENCE,
    FINETUNED,
    NO_IMAGE,
    OWN,
    PRETRAINED,
    REFERENCE_CAPTIONS,
    SHUFFLED,
    UNTRAINED,
    name_group,
    split_group,
)
from dj2mgm.storage.files import replace_file
from dj2mgm.verdict_kinds import VerdictKind

if TYPE_CHECKING:
    import pandas as pd

JUDGED_METRICS = ("clip_score", "ref_clip_score")  # measured by both judges


def find_obstacle(metric: str, *experiments: ExperimentResults) -> str:
    """Return why a metric of these experiments cannot be compared; empty if it can."""
    if is_task_metric(metric):
        return ""  # a task of lmms-eval has the same questions for all
    if metric.removeprefix(SECOND_JUDGE_PREFIX) in JUDGED_METRICS:
        return describe_data_difference(*experiments) or describe_judge_difference(
            int(metric.startswith(SECOND_JUDGE_PREFIX)), *experiments
        )
    return describe_data_difference(*experiments)


def describe_data_difference(*experiments: ExperimentResults) -> str:
    """Describe how the held-out data differ; empty if the rows are equal. Another dataset may have equal ids."""
    if all(experiment.evaluation == experiments[0].evaluation for experiment in experiments):
        return ""
    datasets = dict.fromkeys(f"of {experiment.dataset.name}" for experiment in experiments)
    return f"evaluated on different images or questions ({join_words(list(datasets))})"


def describe_judge_difference(index: int, *experiments: ExperimentResults) -> str:
    """Describe how the first (0) or second (1) judges of the experiments differ; empty if they are the same."""
    judged_experiments = [experiment for experiment in experiments if index < len(experiment.judges)]
    judges = list(dict.fromkeys(experiment.judges[index].title for experiment in judged_experiments))
    prompts = list(dict.fromkeys(f"“{experiment.runs[0].prompt}”" for experiment in judged_experiments))
    differences = [f"by different models, {join_words(judges)}"] if len(judges) > 1 else []
    differences += [f"with different prompts before the captions, {join_words(prompts)}"] if len(prompts) > 1 else []
    return f"judged {'; and '.join(differences)}" if differences else ""


def describe_obstacles(experiment: ExperimentResults, reference: ExperimentResults) -> list[str]:
    """Return sentences that state which metrics of two experiments are not compared, and why."""
    names = f"{experiment.name} and {reference.name}"
    if difference := describe_data_difference(experiment, reference):
        return [f"{names} were {difference}. Their scores cannot be compared."]
    return [
        f"Captions of {names} were {difference}. {owner}CLIPScore and RefCLIPScore cannot be compared."
        for index, owner in enumerate(("", "The second judge's "))
        if (difference := describe_judge_difference(index, experiment, reference))
    ]


def select_comparable_scores(
    experiment: ExperimentResults, reference: ExperimentResults
) -> tuple[list[RunScores], list[RunScores]]:
    """Return the scores of both, each as one entry per run, reduced to the metrics that can be compared."""
    measured = {metric for metrics in experiment.groups.values() for metric in metrics}
    comparable = {metric for metric in measured if not find_obstacle(metric, experiment, reference)}
    own_scores, reference_scores = (
        [select_metrics(run, comparable) for run in results.scores] for results in (experiment, reference)
    )
    return own_scores, reference_scores


def compute_score_differences(experiment: ExperimentResults, reference: ExperimentResults) -> GroupEstimates:
    """Return own − reference, paired by seed and image; empty if nothing can be compared."""
    return estimate_paired_difference(*select_comparable_scores(experiment, reference))


def compare_with_first(experiments: list[ExperimentResults]) -> dict[str, GroupEstimates]:
    """Return the differences of each later experiment from the first, by name, with the seed noise of all."""
    reference, *later_experiments = experiments
    values = [pair_values(*select_comparable_scores(experiment, reference)) for experiment in later_experiments]
    return dict(zip((experiment.name for experiment in later_experiments), estimate_differences(values), strict=True))


COLUMNS = [
    *("experiment", "seeds", "group", "metric", "value", "low", "high", "n"),
    *("difference", "difference_low", "difference_high", "difference_seeds"),
]
SCORE_TITLES = {  # inside a sentence
    "answer_probability": "probability of the right answer",
    "answer_log_likelihood": "log-likelihood of the right answer (nats)",
    "likelihood_gain": "gain in log-likelihood of the right answer over a shuffled image (nats)",
    "vqa_accuracy": "VQA accuracy",
    "attribute_accuracy": "attribute accuracy",
    "caption_log_likelihood": "log-likelihood of the caption (nats per token)",
    "clip_score": "CLIPScore",
    "ref_clip_score": "RefCLIPScore",
}
LOWER_IS_BETTER = {"extra_objects"}
HEADLINES = {  # metrics with a card in the report, and their meaning
    "answer_probability": "mean probability of the right answers to held-out questions",
    "vqa_accuracy": "held-out questions answered correctly",
    "attribute_accuracy": "share of colors, shapes and positions that captions state correctly",
    "clip_score": "how well captions fit their images",
    "ref_clip_score": "how well captions fit images and reference captions",
    "second_clip_score": "how well captions fit their images, by the second judge",
    "second_ref_clip_score": "how well captions fit images and reference captions, by the second judge",
}
MODEL_LABELS = {FINETUNED: "Fine-tuned", PRETRAINED: "Pretrained", UNTRAINED: "Before training"}
IMAGE_LABELS = {OWN: "", SHUFFLED: ", shuffled images", DIFFERENCE: " − shuffled images", NO_IMAGE: ", no image"}
GROUP_LABELS = {
    name_group(model, images): model_label + image_label
    for model, model_label in MODEL_LABELS.items()
    for images, image_label in IMAGE_LABELS.items()
} | {REFERENCE_CAPTIONS: "Reference captions"}


@dataclass(frozen=True)
class HeadlineScore:
    """The score that decides, declared before the results are seen."""

    title: str
    group: str
    metric: str
    margin: float

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER


def find_headline(experiments: list[ExperimentResults], share_of_rows: float = 1) -> HeadlineScore:
    """Return the score that decides between trainings on this share of the rows (`ReportSection.locate_headline`)."""
    settings = experiments[0].config.report
    has_questions = any(run.question_count for experiment in experiments for run in experiment.runs)
    headline = settings.locate_headline(has_questions, share_of_rows)
    return HeadlineScore(SCORE_TITLES[headline.key], headline.group, headline.metric, settings.margin)


def tabulate_scores(experiments: list[ExperimentResults], differences: dict[str, GroupEstimates]) -> "pd.DataFrame":
    """Return one row per experiment, group and metric, with the paired difference from the first experiment.

    `value`, `low` and `high` are the mean over the seeds and its 95 % interval (empty for one image), `n` is the number
    of values per seed. A difference is over the seeds that both experiments have, whose number is `difference_seeds`.
    If one of them has more seeds, it is not the difference of the values. Differences are empty for the first
    experiment, for metrics that only one experiment has, and for metrics that cannot be compared (`find_obstacle`). The
    group `<model>/difference` is own − shuffled images.
    """
    rows = []
    for experiment in experiments:
        for group, estimates in experiment.groups.items():
            for metric, estimate in estimates.items():
                difference = differences.get(experiment.name, {}).get(group, {}).get(metric)
                score_values = [estimate.mean, estimate.low, estimate.high, estimate.n]
                difference_values = [None] * 4
                if difference:
                    difference_values = [difference.mean, difference.low, difference.high, difference.seeds]
                rows.append([experiment.name, estimate.seeds, group, metric, *score_values, *difference_values])
    import pandas as pd  # here, because many commands need only the titles and formats

    return pd.DataFrame(rows, columns=COLUMNS)


def write_table(table: "pd.DataFrame", path: str | Path) -> None:
    """Write a CSV with at most six digits after the point."""
    with replace_file(path) as file:
        table.round(6).to_csv(file, index=False, lineterminator="\n")


def classify_difference(metric: str, difference: Estimate) -> VerdictKind:
    """Return what the interval of a difference (own − reference) shows: better, worse or no difference."""
    if difference.is_above_zero or difference.is_below_zero:
        is_better = difference.is_above_zero != (metric in LOWER_IS_BETTER)
        return VerdictKind.BETTER if is_better else VerdictKind.WORSE
    return VerdictKind.NO_DIFFERENCE


def describe_verdict_scope(difference: Estimate) -> str:
    """Return the scope of "better" and "worse". With one seed it is the two trained models and not their data."""
    return " for these two models" if difference.seeds == 1 else ""


def describe_coverage(seeds: int) -> str:
    """Return a note on what the intervals of scores and differences over some seeds cover."""
    if seeds == 1:
        return (
            "With one seed, the 95 % intervals allow for other held-out images only. Another seed would also change "
            "the scores."
        )
    return "The 95 % intervals allow for other held-out images and other seeds."


def describe_paired_seeds(experiments: list[ExperimentResults]) -> str:
    """Return a note on the seeds of the differences; empty if all experiments have the seeds of the first."""
    reference, *others = experiments
    paired = {
        experiment.name: len(set(experiment.seeds) & set(reference.seeds))
        for experiment in others
        if set(experiment.seeds) != set(reference.seeds)
    }
    if not paired:
        return ""
    counts = join_words([f"{number} of {name}" for name, number in paired.items()])
    return (
        f"Differences are over the seeds that both sides have ({counts}), so they differ from the differences of the "
        "means shown."
    )


def describe_chance(comparisons: int, one_seed: bool) -> str:
    """Return a note on chance findings among several intervals; empty for a single comparison.

    `one_seed` is true if any difference compares two single models. The share of chance findings is then unknown.
    """
    if comparisons < 2:
        return ""
    chance = "" if one_seed else " If there is no true difference, about one in 20 is marked better or worse by chance."
    return f"The {comparisons} intervals are not corrected for their number.{chance}"


def format_score(metric: str, value: float) -> str:
    """Format a score; shares in percent."""
    return f"{format_number(100 * value, 1)} %" if is_share(metric) else format_number(value, 3)


def format_difference(metric: str, value: float) -> str:
    """Format a difference with its sign; shares in percentage points."""
    if is_share(metric):
        return f"{format_number(100 * value, 1, signed=True)} points"
    return format_number(value, 3, signed=True)


def format_interval(metric: str, estimate: Estimate, show: Callable[[str, float], str] = format_score) -> str:
    """Format the ends of an interval as scores or, with `format_difference`, as differences; without units."""
    if estimate.low is None:
        return "no interval, one image"
    low, high = (show(metric, end).removesuffix(" %").removesuffix(" points") for end in estimate.ends)
    return f"{low} to {high}"


def build_metric_table(experiment: ExperimentResults) -> Table:
    """Tabulate all metrics of one experiment, headline metrics first, with a column per group."""

    def build_cell(group: str, metric: str, estimate: Estimate) -> Cell:
        show = format_difference if split_group(group)[1] == DIFFERENCE else format_score
        return Cell(show(metric, estimate.mean), format_interval(metric, estimate))

    return _tabulate(f"Metrics of {experiment.name}", experiment.groups, build_cell)


def build_difference_table(experiment: str, differences: GroupEstimates) -> Table:
    """Tabulate an experiment's differences from the reference in the same way."""

    def build_cell(group: str, metric: str, difference: Estimate) -> Cell:
        # whether more is better is not known for metrics of lmms-eval
        has_verdict = split_group(group)[1] == OWN and not is_task_metric(metric)
        css_class = classify_difference(metric, difference).css_class if has_verdict else ""
        interval = format_interval(metric, difference, format_difference)
        return Cell(format_difference(metric, difference.mean), interval, css_class)

    shown = {name: metrics for name, metrics in differences.items() if name != REFERENCE_CAPTIONS}
    return _tabulate(f"Differences of {experiment}", shown, build_cell)


def _tabulate(label: str, estimates: GroupEstimates, build_cell: Callable[[str, str, Estimate], Cell]) -> Table:
    """Return a table with a column per group and a row per metric, the headline metrics first."""
    groups = [name for name in GROUP_LABELS if name in estimates]
    measured = dict.fromkeys(metric for name in groups for metric in estimates[name])
    metrics = [name for name in HEADLINES if name in measured] + [name for name in measured if name not in HEADLINES]
    rows = [
        TableRow(
            find_title(metric),
            [
                build_cell(name, metric, estimates[name][metric]) if metric in estimates[name] else None
                for name in groups
            ],
            highlighted=metric in HEADLINES,
        )
        for metric in metrics
    ]
    return Table(label, ["metric", *(GROUP_LABELS[name] for name in groups)], rows)


def lower_title(metric: str) -> str:
    """Return the title of a score inside a sentence."""
    if metric.startswith(BY_TYPE):
        return f"VQA accuracy, {metric.removeprefix(BY_TYPE)}"
    if metric.startswith(SECOND_JUDGE_PREFIX):
        return f"{lower_title(metric.removeprefix(SECOND_JUDGE_PREFIX))}, second judge"
    return SCORE_TITLES.get(metric, metric.replace("_", " "))


def find_title(metric: str) -> str:
    """Return the title of a score at the beginning of a row."""
    title = lower_title(metric)
    return title if is_task_metric(metric) else title[0].upper() + title[1:]
