"""What a caption of a scene gets right: color, shape and position of each object, against the known objects."""

import re

import numpy as np

from dj2mgm.evaluation.groups import Metrics
from dj2mgm.evaluation.intervals import Measurements

ATTRIBUTES = ("color", "shape", "position")
# The grammar of data/shapes/scenes.py:describe, for one object; the vocabulary is left open, for any color or shape.
OBJECT = re.compile(r"\ban? (\w+) (\w+) at the (\w+ \w+)")


def parse_caption(caption: str) -> list[dict[str, str]]:
    """The objects a caption states, in its order; what is not in the grammar states nothing.

    >>> parse_caption("a red circle at the top left and something blurred")
    [{'color': 'red', 'shape': 'circle', 'position': 'top left'}]
    """
    return [dict(zip(ATTRIBUTES, found, strict=True)) for found in OBJECT.findall(caption.lower())]


def judge_caption(caption: str, objects: list[dict[str, str]]) -> np.ndarray:
    """Which reference attributes the caption states correctly, objects matched by position.

    An object that the caption leaves out is wrong in all three; of two objects stated at one position the first counts.

    Returns:
        (number of objects, 3) bool, columns as in ATTRIBUTES.
    """
    stated: dict[str, dict[str, str]] = {}
    for item in parse_caption(caption):
        stated.setdefault(item["position"], item)
    right = np.zeros((len(objects), len(ATTRIBUTES)), dtype=bool)
    for index, wanted in enumerate(objects):
        if found := stated.get(wanted["position"]):
            right[index] = [found[name] == wanted[name] for name in ATTRIBUTES]
    return right


def count_extra(caption: str, objects: list[dict[str, str]]) -> int:
    """Objects stated at positions where there is none, or twice at one position."""
    stated = [item["position"] for item in parse_caption(caption)]
    return len(stated) - len(set(stated) & {item["position"] for item in objects})


def is_true(caption: str, true_caption: str) -> bool:
    """Whether a caption states at least one object, and only objects that the true caption states too."""
    stated, known = parse_caption(caption), parse_caption(true_caption)
    return bool(stated) and all(item in known for item in stated)


def attribute_metrics(captions: list[str], rows: list[dict]) -> Metrics:
    """Metrics over the evaluation rows that have `objects`; none at all if no row has.

    `attribute_accuracy` is the share of all reference attributes stated correctly, `<attribute>_accuracy` the same for
    one kind; `exact_match` the share of captions equal to a reference; `extra_objects` the mean number per caption of
    objects that are not there (accuracy alone would reward naming every place).
    """
    known = [(caption, row) for caption, row in zip(captions, rows, strict=True) if row["objects"]]
    if not known:
        return {}
    images = [row["image_id"] for _, row in known]
    right = np.concatenate([judge_caption(caption, row["objects"]) for caption, row in known])  # (objects, 3)
    owners = [row["image_id"] for _, row in known for _ in row["objects"]]  # (objects,)
    metrics = {"attribute_accuracy": Measurements.of(right.ravel(), np.repeat(owners, len(ATTRIBUTES)))}
    for column, name in enumerate(ATTRIBUTES):
        metrics[f"{name}_accuracy"] = Measurements.of(right[:, column], owners)
    metrics["exact_match"] = Measurements.of([caption.strip() in row["captions"] for caption, row in known], images)
    metrics["extra_objects"] = Measurements.of([count_extra(caption, row["objects"]) for caption, row in known], images)
    return metrics
