"""Accuracy of a scene's caption: color, shape and position of each object, compared with the known objects."""

import re

import numpy as np

from dj2mgm.evaluation.groups import Metrics
from dj2mgm.evaluation.intervals import Measurements

ATTRIBUTES = ("color", "shape", "position")
# The grammar of data/shapes.py:describe_scene for one object, with any words for color and shape.
OBJECT_PHRASE = re.compile(r"\ban? (\w+) (\w+) at the (\w+ \w+)")


def parse_caption(caption: str) -> list[dict[str, str]]:
    """Return the objects of a caption in its order, ignoring text outside the grammar.

    >>> parse_caption("a red circle at the top left and something blurred")
    [{'color': 'red', 'shape': 'circle', 'position': 'top left'}]
    """
    return [dict(zip(ATTRIBUTES, words, strict=True)) for words in OBJECT_PHRASE.findall(caption.lower())]


def judge_caption(caption: str, objects: list[dict[str, str]]) -> np.ndarray:
    """Return which reference attributes the caption states correctly: (objects, 3) bool, columns as in ATTRIBUTES.

    Objects are matched by position. All three attributes of an object that the caption leaves out are wrong. If the
    caption states two objects at one position, the first counts.
    """
    items: dict[str, dict[str, str]] = {}  # by position
    for item in parse_caption(caption):
        items.setdefault(item["position"], item)
    right = np.zeros((len(objects), len(ATTRIBUTES)), dtype=bool)
    for index, expected in enumerate(objects):
        if item := items.get(expected["position"]):
            right[index] = [item[name] == expected[name] for name in ATTRIBUTES]
    return right


def count_extra(caption: str, objects: list[dict[str, str]]) -> int:
    """Count the stated objects at positions without an object, and repeated ones at one position."""
    positions = [item["position"] for item in parse_caption(caption)]
    return len(positions) - len(set(positions) & {item["position"] for item in objects})


def is_true(caption: str, true_caption: str) -> bool:
    """Return whether a caption states at least one object, and only objects of the true caption."""
    items, true_items = parse_caption(caption), parse_caption(true_caption)
    return bool(items) and all(item in true_items for item in items)


def measure_attributes(captions: list[str], rows: list[dict]) -> Metrics:
    """Compute metrics over the evaluation rows with `objects`; {} if no row has them.

    `attribute_accuracy` is the share of all reference attributes that are stated correctly, `<attribute>_accuracy` the
    same for one attribute, `exact_match` the share of captions equal to a reference, and `extra_objects` the mean
    number of invented objects per caption, because accuracy alone would reward naming an object at every position.
    """
    pairs = [(caption, row) for caption, row in zip(captions, rows, strict=True) if row["objects"]]
    if not pairs:
        return {}
    images = [row["image_id"] for _, row in pairs]
    right = np.concatenate([judge_caption(caption, row["objects"]) for caption, row in pairs])  # (objects, 3)
    owners = [row["image_id"] for _, row in pairs for _ in row["objects"]]  # (objects,)
    metrics = {"attribute_accuracy": Measurements.from_values(right.ravel(), np.repeat(owners, len(ATTRIBUTES)))}
    for column, name in enumerate(ATTRIBUTES):
        metrics[f"{name}_accuracy"] = Measurements.from_values(right[:, column], owners)
    metrics["exact_match"] = Measurements.from_values(
        [caption.strip() in row["captions"] for caption, row in pairs], images
    )
    metrics["extra_objects"] = Measurements.from_values(
        [count_extra(caption, row["objects"]) for caption, row in pairs], images
    )
    return metrics
