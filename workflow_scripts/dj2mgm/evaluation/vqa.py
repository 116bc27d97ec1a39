"""Accuracy of short answers by exact match after normalization, and likelihoods of reference answers and captions.

Likelihoods are the sharpest metrics of what a model has learned. The log-likelihood of an answer is the sum of
ln p(token | image, question, tokens before it) over its tokens and those that end it. Its probability is exp of that
sum. The log-likelihood of a caption is the mean over its tokens, because captions differ in length. Only the likeliest
reference caption of each image counts. Sources: docs/evaluation.md.
"""

from collections.abc import Sequence
from math import exp
from pathlib import Path

from dj2mgm.evaluation.groups import BY_TYPE, Metrics, Rows, estimate_groups, read_paired_rows
from dj2mgm.evaluation.intervals import Measurements
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


ANSWER, CAPTION = "answer", "caption"  # kinds of references
LIKELIHOOD_DECIMALS = 6


def build_likelihood_row(kind: str, question: str, reference: str, values: Sequence[float]) -> dict:
    """Return the row of likelihoods.jsonl for a reference with the log-likelihoods of its tokens."""
    total = {"log_likelihood": round(sum(values), LIKELIHOOD_DECIMALS), "tokens": len(values)}
    return {"kind": kind, "question": question, "reference": reference} | total


def read_likelihoods(path: str | Path) -> dict[str, dict[str, Rows]]:
    """Read likelihoods.jsonl; see `groups.read_paired_rows`."""
    return read_paired_rows(path, key=("id", "kind", "question", "reference"))


def measure_log_likelihoods(models: dict[str, dict[str, Rows]]) -> dict[str, Metrics]:
    """Measure every model on own and shuffled images: answers, and the best caption of each image."""
    return {f"{model}/{images}": _measure(rows) for model, pair in models.items() for images, rows in pair.items()}


def _measure(rows: Rows) -> Metrics:
    """Return means by image: probability and log-likelihood (nats) of answers; nats per token of the best caption."""
    metrics = {}
    if answers := [row for row in rows if row["kind"] == ANSWER]:
        units = [row["image_id"] for row in answers]
        metrics["answer_probability"] = Measurements.from_values([exp(row["log_likelihood"]) for row in answers], units)
        metrics["answer_log_likelihood"] = Measurements.from_values([row["log_likelihood"] for row in answers], units)
    best: dict[str, float] = {}  # by image
    for row in rows:
        if row["kind"] == CAPTION:
            value = row["log_likelihood"] / row["tokens"]
            best[row["image_id"]] = max(best.get(row["image_id"], value), value)
    if best:
        metrics["caption_log_likelihood"] = Measurements.from_values(
            [best[unit] for unit in sorted(best)], sorted(best)
        )
    return metrics
