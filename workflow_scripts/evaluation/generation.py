"""Which images a model is asked about: each row's own, and another one's as a control."""

import random
from collections.abc import Iterable
from pathlib import Path

from formats.images import locate_image


def other_images(count: int, seed: int) -> list[int]:
    """For each of `count` images the index of another one, each used once: a random cycle (Sattolo 1986)."""
    order = list(range(count))
    rng = random.Random(seed)
    for i in range(count - 1, 0, -1):
        j = rng.randrange(i)
        order[i], order[j] = order[j], order[i]
    return order


def image_paths(root: str | Path, rows: Iterable[dict]) -> list[Path]:
    return [locate_image(root, row["image"]) for row in rows]
