"""Accuracy of short answers: exact match after normalization, overall and by question type."""

from dj2mgm.evaluation.groups import Metrics, Rows, estimate_groups
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.evaluation.metric_kinds import BY_TYPE
from dj2mgm.score_groups import OWN

ARTICLES = {"a", "an", "the"}


def normalize_answer(answer: str) -> str:
    """Normalize to lower case, single spaces, no final full stop, no articles: "The top left." → "top left".

    An answer that consists of an article only is kept, so that option A of a multiple choice does not become empty.
    """
    words = answer.lower().strip().removesuffix(".").split()
    return " ".join([word for word in words if word not in ARTICLES] or words)


def is_correct(row: dict) -> bool:
    return normalize_answer(row["prediction"]) == normalize_answer(row["answer"])


def measure_rows(rows: Rows) -> Metrics:
    """Measure `vqa_accuracy` over all rows (micro average) and `vqa_accuracy_<type>` by question type."""
    by_metric: dict[str, Rows] = {"vqa_accuracy": rows}
    for row in sorted(rows, key=lambda row: row["type"]):
        by_metric.setdefault(BY_TYPE + row["type"], []).append(row)
    return {
        name: Measurements.from_values([is_correct(row) for row in group], [row["image_id"] for row in group])
        for name, group in by_metric.items()
    }


def measure_accuracy(models: dict[str, dict[str, Rows]]) -> dict[str, Metrics]:
    """Measure every model on own and shuffled images; `models` are pairs of rows from `groups.read_paired_rows`."""
    return {f"{model}/{images}": measure_rows(rows) for model, pair in models.items() for images, rows in pair.items()}


def merge_metrics(first: dict[str, Metrics], second: dict[str, Metrics]) -> dict[str, Metrics]:
    """Return the metrics of both by group."""
    return {group: first.get(group, {}) | second.get(group, {}) for group in dict.fromkeys([*first, *second])}


def evaluate_answers(models: dict[str, dict[str, Rows]], likelihoods: dict[str, Metrics]) -> dict:
    """Return estimates and counts of the models of `measure_accuracy`, with metrics of likelihoods.

    Returns:
        {"questions": number of questions for each model, "groups": {group: estimates}, "counts": {group: {…}}};
        without questions, 0.
    """
    counts = {
        f"{model}/{images}": {"answers": len(rows), "empty": sum(not row["prediction"].strip() for row in rows)}
        for model, pair in models.items()
        for images, rows in pair.items()
    }
    return {
        "questions": max((len(pair[OWN]) for pair in models.values()), default=0),
        "groups": estimate_groups(merge_metrics(measure_accuracy(models), likelihoods)),
        "counts": counts,
    }
