"""Groups for which metrics are reported, such as own and shuffled images; kinds of metrics; images of the rows.

A model that ignores images scores the same on own and shuffled images, so the paired difference is the evidence.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path

import numpy as np

from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.intervals import Estimate, Measurements, estimate
from dj2mgm.score_groups import DIFFERENCE, NO_IMAGE, OWN, REFERENCE_CAPTIONS, SHUFFLED, name_group, split_group
from dj2mgm.storage.files import read_jsonl
from dj2mgm.storage.image_files import compute_image_digest

BY_TYPE = "vqa_accuracy_"  # prefix of the accuracies by question type; users name types, such as "yes/no"
SECOND_JUDGE_PREFIX = "second_"  # prefix of the second judge's metrics
Rows = list[dict]
Metrics = dict[str, Measurements]  # by metric name
Estimates = dict[str, Estimate]  # by metric name
HELD_OUT = "held_out"


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


def read_paired_rows(path: str | Path, key: tuple[str, ...]) -> dict[str, dict[str, Rows]]:
    """Read captions.jsonl or answers.jsonl as {model: {"own": rows, "shuffled": rows}}, paired by `key`.

    Rows without an image are added as "none".
    """
    models: dict[str, dict[str, Rows]] = {}
    for row in read_jsonl(path):
        models.setdefault(row["model"], {OWN: [], SHUFFLED: []}).setdefault(row["images"], []).append(row)
    for pair in models.values():
        for rows in pair.values():
            rows.sort(key=lambda row: [row[name] for name in key])
    return models


def estimate_metrics(metrics: Metrics, paired: bool = False) -> Estimates:
    """Estimate the metrics of one run with one seed; `paired` if they are differences of two scores."""
    estimates = {}
    for name, measurements in metrics.items():
        _, sums, counts = measurements.sum_by_unit()
        estimates[name] = estimate_metric(name, sums[None], counts, paired)
    return estimates


def estimate_metric(name: str, sums: np.ndarray, counts: np.ndarray, paired: bool) -> Estimate:
    """Estimate a metric within its range of possible scores or, if `paired`, of differences of two scores."""
    low, high = find_score_range(name)
    return estimate(sums, counts).clip_interval(*((low - high, high - low) if paired else (low, high)))


def estimate_pair(model: str, own_metrics: Metrics, shuffled_metrics: Metrics) -> dict[str, Estimates]:
    """Estimate `<model>/own`, `<model>/shuffled` and `<model>/difference` (own − shuffled, paired)."""
    difference = {name: own_metrics[name] - shuffled_metrics[name] for name in own_metrics}
    groups = {OWN: own_metrics, SHUFFLED: shuffled_metrics, DIFFERENCE: difference}
    return {name_group(model, name): estimate_metrics(metrics, name == DIFFERENCE) for name, metrics in groups.items()}


def estimate_groups(measured: dict[str, Metrics]) -> dict[str, Estimates]:
    """Estimate the groups `<model>/own`, `<model>/shuffled`, `<model>/difference`, `<model>/none` and `reference`."""
    groups: dict[str, Estimates] = {}
    for group, metrics in measured.items():
        model, images = split_group(group)
        if images == OWN:
            groups |= estimate_pair(model, metrics, measured[name_group(model, SHUFFLED)])
        elif model == REFERENCE_CAPTIONS or images == NO_IMAGE:
            groups[group] = estimate_metrics(metrics)
    return groups


def iterate_score_rows(measured: dict[str, Metrics]) -> Iterator[dict]:
    """Yield the rows of scores.jsonl by group and image, from which means over images, seeds and pairs are computed.

    {"model": "pretrain", "images": "own", "id": "e000001", "values": {"attribute_accuracy": [5.0, 6]}} contains the
    image's id (`assign_image_ids`), and the sum and number of its values of each metric. The control `reference` has
    `images` "own".
    """
    for group, metrics in measured.items():
        model, images = split_group(group)
        by_image: dict[str, dict[str, list[float]]] = {}
        for metric, measurements in metrics.items():
            columns = (column.tolist() for column in measurements.sum_by_unit())
            for identifier, total, count in zip(*columns, strict=True):
                by_image.setdefault(identifier, {})[metric] = [total, count]
        for identifier in sorted(by_image):
            yield {"model": model, "images": images or OWN, "id": identifier, "values": by_image[identifier]}


def format_group_name(row: dict) -> str:
    """Return the name of the group of a row of scores.jsonl."""
    return REFERENCE_CAPTIONS if row["model"] == REFERENCE_CAPTIONS else name_group(row["model"], row["images"])


def read_leaked_ids(file: Path | None, origin: str) -> set[str]:
    """Return the ids of the questions or held-out rows whose image is in the training data, from the file of leaks.

    `origin` is the name of a benchmark, or `HELD_OUT`.
    """
    if file is None:
        return set()
    return {identifier for leak in read_jsonl(file) if leak["of"] == origin for identifier in leak["ids"]}


def draw_other_images(count: int, seed: int) -> list[int]:
    """Return the index of another image for each of `count` images, each used once: a random cycle (Sattolo 1986)."""
    order = list(range(count))
    rng = random.Random(seed)
    for i in range(count - 1, 0, -1):
        j = rng.randrange(i)
        order[i], order[j] = order[j], order[i]
    return order


def draw_control_paths(paths: Sequence[Path], seed: int) -> list[Path]:
    """Return another image for each row's image; rows with the same image get the same other image."""
    images = list(dict.fromkeys(paths))
    other_paths = {
        image: images[index] for image, index in zip(images, draw_other_images(len(images), seed), strict=True)
    }
    return [other_paths[path] for path in paths]


def locate_row_images(root: str | Path, rows: Iterable[dict]) -> list[Path]:
    """Return the file of each row's image, the first one if several files have the same content."""
    paths = []
    first_paths: dict[str, Path] = {}  # by digest
    distinct_paths: dict[Path, Path] = {}
    for row in rows:
        try:
            path = locate_image(root, row["image"])
            if path not in distinct_paths:
                distinct_paths[path] = first_paths.setdefault(compute_image_digest(path), path)
            paths.append(distinct_paths[path])
        except (BadImageError, OSError) as error:
            raise InputError(f"evaluation row {row['id']}: {error}; fix the image or delete the row") from None
    return paths


def assign_image_ids(rows: Iterable[dict], paths: Iterable[Path]) -> list[str]:
    """Return each row's image id, which is the id of the first row with the same path."""
    first_ids: dict[Path, str] = {}
    return [first_ids.setdefault(path, row["id"]) for row, path in zip(rows, paths, strict=True)]
