"""Search for evaluation images in the training data. Features add their own images, and search for texts."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from dj2mgm.cli.messages import note
from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.data.near_duplicates import (
    CODE_BYTES,
    MAX_BITS,
    MAX_LEVELS,
    SIGNATURE_BYTES,
    compute_distances,
    compute_signature,
    find_near_pairs,
)
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import HELD_OUT, locate_row_images
from dj2mgm.storage.files import find_files, list_files
from dj2mgm.storage.image_files import IMAGE_SUFFIXES
from dj2mgm.storage.streaming import DiskMap, map_in_order

IMAGES_AT_ONCE = 10_000  # images whose signatures are in memory at once

Image = str | Path | bytes


@dataclass(frozen=True)
class Reference:
    """Image on which a model is evaluated."""

    origin: str  # benchmark, `HELD_OUT` or folder
    ids: tuple[str, ...]  # ids of the rows with this image
    questions: int = 0  # number of questions in these rows


@dataclass(frozen=True)
class References:
    """Evaluation images with their signatures, 80 bytes per image."""

    images: list[Reference]
    signatures: np.ndarray  # (N, SIGNATURE_BYTES) uint8

    def find_copied(self, signatures: np.ndarray) -> list[list[tuple[Reference, int]]]:
        """Return, for each image, the references that it copies, with the number of differing bits out of 256.

        The limits are those of the operator `image_near_deduplicator`. `signatures` are (M, SIGNATURE_BYTES) uint8.
        """
        codes, reference_codes = (np.ascontiguousarray(rows[:, :CODE_BYTES]) for rows in (signatures, self.signatures))
        pairs = []
        for indices, reference_indices, _ in find_near_pairs(codes, reference_codes, MAX_BITS):
            bits = compute_distances(signatures[indices], self.signatures[reference_indices], MAX_BITS, MAX_LEVELS)
            near = np.isfinite(bits)
            columns = indices[near], reference_indices[near], bits[near].astype(int)
            pairs += zip(*(column.tolist() for column in columns), strict=True)
        matches: list[list[tuple[Reference, int]]] = [[] for _ in signatures]
        for index, reference_index, differing in sorted(pairs):
            matches[index].append((self.images[reference_index], differing))
        return matches


def read_references(images: dict[Reference, Image], processes: int) -> References:
    """Compute the signatures of the evaluation images."""
    signatures = map_in_order(_try_sign, list(images.values()), processes)
    matrix = np.zeros((len(images), SIGNATURE_BYTES), dtype=np.uint8)
    for index, (reference, signature) in enumerate(zip(images, signatures, strict=True)):
        if signature is None:
            raise InputError(f"{reference.origin}: the image of {reference.ids[0]} cannot be read; fix or remove it")
        matrix[index] = signature
    return References(list(images), matrix)


def _try_sign(image: Image) -> np.ndarray | None:
    try:
        return compute_signature(load_image(image))
    except (BadImageError, OSError):
        return None


def collect_held_out_images(rows: list[dict], root: str | Path) -> dict[Reference, Image]:
    """Return the distinct images of the evaluation rows."""
    rows_by_image: dict[Path, list[dict]] = {}
    for row, path in zip(rows, locate_row_images(root, rows), strict=True):
        rows_by_image.setdefault(path, []).append(row)
    references = {}
    for path, image_rows in rows_by_image.items():
        questions = sum(len(row.get("questions", ())) for row in image_rows)
        references[Reference(HELD_OUT, tuple(row["id"] for row in image_rows), questions)] = path
    return references


def collect_folder_images(folder: Path) -> dict[Reference, Image]:
    """Return the files below a folder with an image suffix; a note counts the other files."""
    files = find_files(folder, IMAGE_SUFFIXES) if folder.is_dir() else []
    if not files:
        raise InputError(f"decontaminate.folders: {folder} contains no image; correct the path")
    if other_count := len(list_files(folder)) - len(files):
        note(
            f"{folder}: {other_count} files are not compared, because their suffix is not one of "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return {Reference(str(folder), (str(file.relative_to(folder)),)): file for file in files}


def find_leaks(images: Iterable[str], root: str | Path, references: References, processes: int) -> Iterator[dict]:
    """Yield {image, path, of, ids, bits} for each training image that is a copy of a reference, in order.

    Unreadable images are skipped; later stages drop them.
    """

    def sign(image: str) -> tuple[str, str, np.ndarray | None]:
        try:
            path = locate_image(root, image)
        except BadImageError:
            return image, "", None
        return image, str(path), _try_sign(path)

    first_numbers = DiskMap()  # of each image
    distinct_images = (
        image for number, image in enumerate(images) if first_numbers.setdefault(image, number) == number
    )
    signatures = (entry for entry in map_in_order(sign, distinct_images, processes) if entry[2] is not None)
    while block := list(islice(signatures, IMAGES_AT_ONCE)):
        matches = references.find_copied(np.array([signature for _, _, signature in block]))
        for (image, path, _), image_matches in zip(block, matches, strict=True):
            for reference, bits in image_matches:
                yield {"image": image, "path": path, "of": reference.origin, "ids": list(reference.ids), "bits": bits}


def count_leaks(
    references: References, leaks: Iterable[dict], rows: Iterable[tuple[str, list[str]]]
) -> dict[str, dict]:
    """Count the leaks of each origin: of each benchmark, of the held-out images and of each folder.

    Args:
        references: the evaluation images.
        leaks: results of `find_leaks`, each with its `split`.
        rows: split and images of each row of the training data.

    Returns:
        By origin, the numbers of evaluation images (`references`), of leaked images (`leaked`) and of their
        `questions`, of the `training_images` that are copies and of the `training_rows` with such an image.
    """
    reference_counts = Counter(reference.origin for reference in references.images)
    questions = {(reference.origin, reference.ids): reference.questions for reference in references.images}
    leaked_ids: dict[str, set[tuple[str, ...]]] = {origin: set() for origin in reference_counts}
    images: dict[str, set[str]] = {origin: set() for origin in reference_counts}
    origins_by_image = DiskMap()  # as JSON, by split and image as JSON
    for leak in leaks:
        leaked_ids[leak["of"]].add(tuple(leak["ids"]))
        images[leak["of"]].add(leak["path"])
        key = json.dumps([leak["split"], leak["image"]])
        origins = {leak["of"], *json.loads(origins_by_image.get(key) or "[]")}
        origins_by_image.replace([(key, json.dumps(sorted(origins)))])
    row_counts: Counter[str] = Counter()
    for split, row_images in rows if any(images.values()) else ():
        texts = (origins_by_image.get(json.dumps([split, image])) for image in row_images)
        row_counts.update({origin for text in texts if text for origin in json.loads(text)})
    return {
        origin: {
            "references": count,
            "leaked": len(leaked_ids[origin]),
            "questions": sum(questions[origin, ids] for ids in leaked_ids[origin]),
            "training_images": len(images[origin]),
            "training_rows": row_counts[origin],
        }
        for origin, count in reference_counts.items()
    }
