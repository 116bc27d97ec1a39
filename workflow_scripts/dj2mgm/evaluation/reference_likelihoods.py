"""Likelihoods of reference answers and captions, the sharpest metrics of what a model has learned.

The log-likelihood of an answer is the sum of ln p(token | image, question, tokens before it) over its tokens and those
that end it. Its probability is exp of that sum. The log-likelihood of a caption is the mean over its tokens, because
captions differ in length. Only the likeliest reference caption of each image counts. Sources: docs/evaluation.md.
"""

from collections.abc import Sequence
from math import exp
from pathlib import Path

from dj2mgm.evaluation.groups import Metrics, Rows, read_paired_rows
from dj2mgm.evaluation.intervals import Measurements

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
