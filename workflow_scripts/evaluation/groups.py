"""The groups that every metric is reported for: each model on the own images, on shuffled ones, and their difference.

A model that does not look scores the same on both, whatever it scores; so the paired difference is the evidence.
"""

from pathlib import Path

from errors import InputError
from evaluation.bootstrap import Measurements, bootstrap_mean
from files import read_jsonl

Rows = list[dict]
Metrics = dict[str, Measurements]  # by metric name
Estimates = dict[str, dict[str, float]]  # by metric name: n, mean, low, high


def read_pairs(path: str | Path, key: tuple[str, ...]) -> dict[str, dict[str, Rows]]:
    """Rows of captions.jsonl or answers.jsonl as {model: {"own": rows, "shuffled": rows}}, paired by `key`.

    Raises:
        InputError: the two lists of a model are not about the same keys.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist; run the rule generate_answers first")
    models: dict[str, dict[str, Rows]] = {}
    for row in read_jsonl(path):
        models.setdefault(row["model"], {"own": [], "shuffled": []})[row["images"]].append(row)
    for model, pair in models.items():
        for rows in pair.values():
            rows.sort(key=lambda row: [row[name] for name in key])
        own, shuffled = ([[row[name] for name in key] for row in pair[images]] for images in ("own", "shuffled"))
        if own != shuffled:
            raise InputError(
                f"{path}: {model} has {len(own)} rows on own images and {len(shuffled)} on shuffled ones, and they are "
                f"not about the same {' and '.join(key)}; delete the file and run the rule generate_answers again"
            )
    return models


def estimate(metrics: Metrics, samples: int, seed: int) -> Estimates:
    return {name: bootstrap_mean(measured, samples, seed) for name, measured in metrics.items()}


def estimate_pair(model: str, own: Metrics, shuffled: Metrics, samples: int, seed: int) -> dict[str, Estimates]:
    """Estimates under the keys `<model>/own`, `<model>/shuffled` and `<model>/difference` (own − shuffled, paired)."""
    difference = {name: own[name] - shuffled[name] for name in own}
    groups = {"own": own, "shuffled": shuffled, "difference": difference}
    return {f"{model}/{name}": estimate(metrics, samples, seed) for name, metrics in groups.items()}
