"""The groups that every metric is reported for, and which image a model is shown in each."""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dj2mgm.data.images import BadImage, locate_image
from dj2mgm.data.shards import digest_of
from dj2mgm.errors import InputError
from dj2mgm.evaluation.intervals import Estimate, Measurements, estimate
from dj2mgm.files import read_jsonl

# A model that does not look scores the same on both, whatever it scores; so the paired difference is the evidence.

Rows = list[dict]
Metrics = dict[str, Measurements]  # by metric name
Estimates = dict[str, Estimate]  # by metric name
BY_TYPE = "vqa_accuracy_"  # begins the names of the accuracies on questions of one type, which users name: yes/no
SECOND = "second_"  # begins the names of the metrics that are the second judge's
REFERENCE = "reference"  # the control that says the reference captions; it has no shuffled images
NO_IMAGE = "none"  # the control that is shown no image; its group is <model>/none


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


def estimate_metrics(metrics: Metrics) -> Estimates:
    """Of one run, whose seed is the only one."""
    per_unit = {name: measured.per_unit() for name, measured in metrics.items()}
    return {name: estimate(sums[None], counts) for name, (_, sums, counts) in per_unit.items()}


def estimate_pair(model: str, own: Metrics, shuffled: Metrics) -> dict[str, Estimates]:
    """Estimates under the keys `<model>/own`, `<model>/shuffled` and `<model>/difference` (own − shuffled, paired)."""
    difference = {name: own[name] - shuffled[name] for name in own}
    groups = {"own": own, "shuffled": shuffled, "difference": difference}
    return {f"{model}/{name}": estimate_metrics(metrics) for name, metrics in groups.items()}


def estimate_groups(measured: dict[str, Metrics]) -> dict[str, Estimates]:
    """Estimates of the groups `<model>/own`, `<model>/shuffled` and `reference`, with each model's difference added."""
    groups: dict[str, Estimates] = {}
    for group, metrics in measured.items():
        model, _, images = group.partition("/")
        if images == "own":
            groups |= estimate_pair(model, metrics, measured[f"{model}/shuffled"])
        elif model == REFERENCE:
            groups[group] = estimate_metrics(metrics)
    return groups


def score_rows(measured: dict[str, Metrics]) -> Iterator[dict]:
    """Rows of scores.jsonl, by group and image, from which any mean over images, seeds or differences can be taken.

    {"model": "pretrain", "images": "own", "id": "e000001", "values": {"attribute_accuracy": [5.0, 6]}}: the image's id
    (see `image_ids`), the sum and the number of its values of each metric that it has. The control `reference` is about
    own images.
    """
    for group, metrics in measured.items():
        model, _, images = group.partition("/")
        of_image: dict[str, dict[str, list[float]]] = {}
        for metric, measurements in metrics.items():
            columns = (column.tolist() for column in measurements.per_unit())
            for identifier, total, count in zip(*columns, strict=True):
                of_image.setdefault(identifier, {})[metric] = [total, count]
        for identifier in sorted(of_image):
            yield {"model": model, "images": images or "own", "id": identifier, "values": of_image[identifier]}


def is_of_task(metric: str) -> bool:
    """Whether it is a metric of a task of lmms-eval: <task>/<metric>."""
    return "/" in metric and not metric.startswith(BY_TYPE)


def is_share(metric: str) -> bool:
    """Shares go from 0 to 1 and are shown in per cent; the other metrics are scores or counts. Those of lmms-eval are
    shown as it gives them."""
    return not is_of_task(metric) and ("accuracy" in metric or metric == "exact_match")


def group_of(row: dict) -> str:
    """The group that a row of scores.jsonl belongs to."""
    return REFERENCE if row["model"] == REFERENCE else f"{row['model']}/{row['images']}"


# Which images a model is asked about: each row's own, and another one's as a control.


def other_images(count: int, seed: int) -> list[int]:
    """For each of `count` images the index of another one, each used once: a random cycle (Sattolo 1986)."""
    order = list(range(count))
    rng = random.Random(seed)
    for i in range(count - 1, 0, -1):
        j = rng.randrange(i)
        order[i], order[j] = order[j], order[i]
    return order


def control_paths(paths: Sequence[Path], seed: int) -> list[Path]:
    """For each row's image another one; rows that share an image share its control, too."""
    images = list(dict.fromkeys(paths))
    control = {image: images[other] for image, other in zip(images, other_images(len(images), seed), strict=True)}
    return [control[path] for path in paths]


def image_paths(root: str | Path, rows: Iterable[dict]) -> list[Path]:
    """The file of each row's image. Of files that hold the same bytes it is the first: they are one image.

    Raises:
        InputError: a row's image cannot be found or read; with the row's id.
    """
    paths = []
    first: dict[str, Path] = {}  # by digest
    known: dict[Path, Path] = {}
    for row in rows:
        try:
            path = locate_image(root, row["image"])
            if path not in known:
                known[path] = first.setdefault(digest_of(path), path)
            paths.append(known[path])
        except (BadImage, OSError) as error:
            raise InputError(f"evaluation row {row['id']}: {error}; fix the image or delete the row") from None
    return paths


def image_ids(rows: Iterable[dict], paths: Iterable[Path]) -> list[str]:
    """For each row, which has the image at its path, the id of the first row that has it: the image's id."""
    first: dict[Path, str] = {}
    return [first.setdefault(path, row["id"]) for row, path in zip(rows, paths, strict=True)]
