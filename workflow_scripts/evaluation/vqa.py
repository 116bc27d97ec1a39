"""Accuracy of short answers: exact match after normalisation, overall and per question type."""

from evaluation.bootstrap import Measurements
from evaluation.groups import Estimates, Metrics, Rows, estimate_pair

ARTICLES = {"a", "an", "the"}


def normalise(answer: str) -> str:
    """Lower case, single spaces, no final full stop, no articles ("The top left." is "top left").

    An answer that is nothing but an article stays, so that option A of a multiple choice is not emptied.
    """
    words = answer.lower().strip().removesuffix(".").split()
    return " ".join([word for word in words if word not in ARTICLES] or words)


def is_correct(row: dict) -> bool:
    return normalise(row["prediction"]) == normalise(row["answer"])


def accuracy(rows: Rows) -> Metrics:
    """1 for right and 0 for wrong: `vqa_accuracy` over all rows (micro average), `vqa_accuracy_<type>` per type."""
    by_metric: dict[str, Rows] = {"vqa_accuracy": rows}
    for row in sorted(rows, key=lambda row: row["type"]):
        by_metric.setdefault(f"vqa_accuracy_{row['type']}", []).append(row)
    return {
        name: Measurements.of([is_correct(row) for row in chosen], [row["id"] for row in chosen])
        for name, chosen in by_metric.items()
    }


def evaluate_answers(models: dict[str, dict[str, Rows]], samples: int, seed: int) -> dict:
    """Metrics of every model on own and shuffled images, from `groups.read_pairs(path, ("id", "type", "question"))`.

    Returns:
        {"questions": questions asked of each model, "groups": {group: estimates}, "counts": {group: {…}}};
        with no questions, 0 and empty groups.
    """
    groups: dict[str, Estimates] = {}
    counts: dict[str, dict[str, int]] = {}
    for model, pair in models.items():
        groups |= estimate_pair(model, accuracy(pair["own"]), accuracy(pair["shuffled"]), samples, seed)
        for images, rows in pair.items():
            empty = sum(not row["prediction"].strip() for row in rows)
            counts[f"{model}/{images}"] = {"answers": len(rows), "empty": empty}
    questions = max((len(pair["own"]) for pair in models.values()), default=0)
    return {"questions": questions, "groups": groups, "counts": counts}
