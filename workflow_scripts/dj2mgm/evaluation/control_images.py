"""Files and ids of the images of evaluation rows, and other images for the control with shuffled images."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError
from dj2mgm.storage.image_files import compute_image_digest


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
