"""Which metrics of two experiments can be compared: those measured on the same held-out data, and by the same judge.

All differences between experiments are taken here, and the pages' sentences say why others are not.
"""

from dj2mgm.evaluation.groups import SECOND, is_task_metric
from dj2mgm.evaluation.seeds import Estimates, Scores, paired_difference, select_metrics
from dj2mgm.reporting.drawing import listed
from dj2mgm.reporting.experiment import Experiment

JUDGED = ("clip_score", "ref_clip_score")  # what both judges measure


def obstacle(metric: str, *experiments: Experiment) -> str:
    """What keeps a metric of these experiments from being compared, in words; empty where nothing does."""
    if is_task_metric(metric):
        return ""  # all are asked the same
    if metric.removeprefix(SECOND) in JUDGED:
        return differing_data(*experiments) or differing_judges(int(metric.startswith(SECOND)), *experiments)
    return differing_data(*experiments)


def differing_data(*experiments: Experiment) -> str:
    """Rows are equal where the files are: ids alone say nothing, another dataset may have the same."""
    if all(other.evaluation == experiments[0].evaluation for other in experiments):
        return ""
    datasets = dict.fromkeys(f"of {experiment.dataset.name}" for experiment in experiments)
    return f"evaluated on different images or questions, those {listed(list(datasets))}"


def differing_judges(place: int, *experiments: Experiment) -> str:
    """Of the experiments that have a first (0) or second (1) judge."""
    judged = [experiment for experiment in experiments if place < len(experiment.judges)]
    judges = list(dict.fromkeys(judge_name(experiment.judges[place]) for experiment in judged))
    prompts = list(dict.fromkeys(f"“{experiment.runs[0].clip['prompt']}”" for experiment in judged))
    ways = [f"by different models, {listed(judges)}"] if len(judges) > 1 else []
    ways += [f"with different prompts before the captions, {listed(prompts)}"] if len(prompts) > 1 else []
    return f"judged {'; and '.join(ways)}" if ways else ""


def judge_name(judge: dict) -> str:
    return f"{judge['name']} ({judge['kind']})"


def obstacles(experiment: Experiment, reference: Experiment) -> list[str]:
    """Sentences on what of two experiments is not compared, and why."""
    names = f"{experiment.name} and {reference.name}"
    if found := differing_data(experiment, reference):
        return [f"{names} were {found}: these scores cannot be compared."]
    return [
        f"Captions of {names} were {found}: {whose}CLIPScore and RefCLIPScore cannot be compared."
        for place, whose in enumerate(("", "the second judge's "))
        if (found := differing_judges(place, experiment, reference))
    ]


def alike(experiment: Experiment, reference: Experiment) -> tuple[list[Scores], list[Scores]]:
    """The runs of both, with the metrics that can be compared."""
    measured = {metric for metrics in experiment.groups.values() for metric in metrics}
    chosen = {metric for metric in measured if not obstacle(metric, experiment, reference)}
    own, others = ([select_metrics(run, chosen) for run in one.scores] for one in (experiment, reference))
    return own, others


def score_differences(experiment: Experiment, reference: Experiment) -> Estimates:
    """Own − reference, paired by seed and image, of what can be compared; empty where nothing can.

    Raises:
        InputError: they have no seed or no image in common.
    """
    return paired_difference(*alike(experiment, reference))


def differences_to_first(experiments: list[Experiment]) -> dict[str, Estimates]:
    """Those of the others to the first, by name."""
    reference, *others = experiments
    return {other.name: score_differences(other, reference) for other in others}
