"""Kinds of metrics by name, and the range of their scores."""

from math import inf

BY_TYPE = "vqa_accuracy_"  # prefix of the accuracies by question type; users name types, such as "yes/no"
SECOND_JUDGE_PREFIX = "second_"  # prefix of the second judge's metrics


def is_task_metric(metric: str) -> bool:
    """Return whether a metric belongs to a task of lmms-eval: <task>/<metric>."""
    return "/" in metric and not metric.startswith(BY_TYPE)


def is_share(metric: str) -> bool:
    """Return whether a metric is a share from 0 to 1, which is shown in percent.

    Other metrics are scores or counts. Metrics of lmms-eval are shown unchanged.
    """
    shares = ("accuracy" in metric, metric == "answer_probability", metric == "exact_match")
    return not is_task_metric(metric) and any(shares)


def find_score_range(metric: str) -> tuple[float, float]:
    """Return the smallest and the largest possible score, infinite if there is no bound or the bound is unknown."""
    if is_share(metric):
        return 0.0, 1.0
    if metric.endswith("log_likelihood"):
        return -inf, 0.0
    if metric.removeprefix(SECOND_JUDGE_PREFIX) in ("clip_score", "ref_clip_score", "extra_objects"):
        return 0.0, inf
    return -inf, inf
