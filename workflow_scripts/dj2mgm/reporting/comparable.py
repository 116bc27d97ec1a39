"""Differences between experiments, in the metrics that were measured on the same held-out data and by the same judge.

The pages state why other metrics are not compared.
"""

from dj2mgm.evaluation.groups import SECOND, is_task_metric
from dj2mgm.evaluation.seeds import Estimates, Scores, paired_difference, select_metrics
from dj2mgm.reporting.experiment import ExperimentResults
from dj2mgm.reporting.rendering import join_words

JUDGED_METRICS = ("clip_score", "ref_clip_score")  # measured by both judges


def find_obstacle(metric: str, *experiments: ExperimentResults) -> str:
    """Return why a metric of these experiments cannot be compared; empty if it can."""
    if is_task_metric(metric):
        return ""  # a task of lmms-eval has the same questions for all
    if metric.removeprefix(SECOND) in JUDGED_METRICS:
        return describe_data_difference(*experiments) or describe_judge_difference(
            int(metric.startswith(SECOND)), *experiments
        )
    return describe_data_difference(*experiments)


def describe_data_difference(*experiments: ExperimentResults) -> str:
    """Describe how the held-out data differ; empty if the rows are equal. Another dataset may have equal ids."""
    if all(other.evaluation == experiments[0].evaluation for other in experiments):
        return ""
    datasets = dict.fromkeys(f"of {experiment.dataset.name}" for experiment in experiments)
    return f"evaluated on different images or questions ({join_words(list(datasets))})"


def describe_judge_difference(place: int, *experiments: ExperimentResults) -> str:
    """Describe how the first (0) or second (1) judges of the experiments differ; empty if they are the same."""
    judged = [experiment for experiment in experiments if place < len(experiment.judges)]
    judges = list(dict.fromkeys(judge_name(experiment.judges[place]) for experiment in judged))
    prompts = list(dict.fromkeys(f"“{experiment.runs[0].clip['prompt']}”" for experiment in judged))
    ways = [f"by different models, {join_words(judges)}"] if len(judges) > 1 else []
    ways += [f"with different prompts before the captions, {join_words(prompts)}"] if len(prompts) > 1 else []
    return f"judged {'; and '.join(ways)}" if ways else ""


def judge_name(judge: dict) -> str:
    return f"{judge['name']} ({judge['kind']})"


def describe_obstacles(experiment: ExperimentResults, reference: ExperimentResults) -> list[str]:
    """Return sentences that state which metrics of two experiments are not compared, and why."""
    names = f"{experiment.name} and {reference.name}"
    if found := describe_data_difference(experiment, reference):
        return [f"{names} were {found}. Their scores cannot be compared."]
    return [
        f"Captions of {names} were {found}. {whose}CLIPScore and RefCLIPScore cannot be compared."
        for place, whose in enumerate(("", "The second judge's "))
        if (found := describe_judge_difference(place, experiment, reference))
    ]


def comparable_scores(experiment: ExperimentResults, reference: ExperimentResults) -> tuple[list[Scores], list[Scores]]:
    """Return the scores of both, each as one entry per run, reduced to the metrics that can be compared."""
    measured = {metric for metrics in experiment.groups.values() for metric in metrics}
    chosen = {metric for metric in measured if not find_obstacle(metric, experiment, reference)}
    own, others = ([select_metrics(run, chosen) for run in one.scores] for one in (experiment, reference))
    return own, others


def score_differences(experiment: ExperimentResults, reference: ExperimentResults) -> Estimates:
    """Return own − reference, paired by seed and image; empty if nothing can be compared.

    Raises:
        InputError: the experiments have no seed or no image in common.
    """
    return paired_difference(*comparable_scores(experiment, reference))


def differences_to_first(experiments: list[ExperimentResults]) -> dict[str, Estimates]:
    """Return the differences of each later experiment from the first, by name."""
    reference, *others = experiments
    return {other.name: score_differences(other, reference) for other in others}
