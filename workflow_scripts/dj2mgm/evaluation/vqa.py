"""Accuracy of short answers: exact match after normalization, overall and per question type."""

from dj2mgm.evaluation.groups import BY_TYPE, Metrics, Rows, estimate_groups
from dj2mgm.evaluation.intervals import Measurements

ARTICLES = {"a", "an", "the"}


def normalize(answer: str) -> str:
    """Lower case, single spaces, no final full stop, no articles ("The top left." is "top left").

    An answer that is nothing but an article stays, so that option A of a multiple choice is not emptied.
    """
    words = answer.lower().strip().removesuffix(".").split()
    return " ".join([word for word in words if word not in ARTICLES] or words)


def is_correct(row: dict) -> bool:
    return normalize(row["prediction"]) == normalize(row["answer"])


def accuracy(rows: Rows) -> Metrics:
    """1 for right and 0 for wrong: `vqa_accuracy` over all rows (micro average), `vqa_accuracy_<type>` per type."""
    by_metric: dict[str, Rows] = {"vqa_accuracy": rows}
    for row in sorted(rows, key=lambda row: row["type"]):
        by_metric.setdefault(BY_TYPE + row["type"], []).append(row)
    return {
        name: Measurements.of([is_correct(row) for row in chosen], [row["image_id"] for row in chosen])
        for name, chosen in by_metric.items()
    }


def measure_answers(models: dict[str, dict[str, Rows]]) -> dict[str, Metrics]:
    """Metrics of every model on own and shuffled images, from `groups.read_pairs(path, ("id", "type", "question"))`."""
    return {f"{model}/{images}": accuracy(rows) for model, pair in models.items() for images, rows in pair.items()}


def evaluate_answers(models: dict[str, dict[str, Rows]]) -> dict:
    """Estimates and counts of the same models.

    Returns:
        {"questions": questions asked of each model, "groups": {group: estimates}, "counts": {group: {…}}};
        with no questions, 0 and empty groups.
    """
    counts = {
        f"{model}/{images}": {"answers": len(rows), "empty": sum(not row["prediction"].strip() for row in rows)}
        for model, pair in models.items()
        for images, rows in pair.items()
    }
    return {
        "questions": max((len(pair["own"]) for pair in models.values()), default=0),
        "groups": estimate_groups(measure_answers(models)),
        "counts": counts,
    }
