"""Which of many pictures are copies of which: of those that are near each other, the one with the best score is kept.

Kept pictures are the centers of stars: each copy is near the kept picture that it is a copy of, and no two kept ones
are near each other. (In a chain, with each near the next, a picture could stand for one that it does not resemble.)
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.streaming import DiskMap

Candidates = Callable[[np.ndarray], Iterable[tuple[np.ndarray, np.ndarray]]]
Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
Stars = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Copies:
    """
    Args:
        copy_of: (N,) int32, place of the kept row that a row is a copy of; -1 for a row that is kept.
        distance: (N,) float32, between the two.
    """

    copy_of: np.ndarray
    distance: np.ndarray

    def sizes(self) -> dict[str, int]:
        """Number of clusters by their size, a kept row with its copies."""
        _, copies = np.unique(self.copy_of[self.copy_of >= 0], return_counts=True)
        sizes, clusters = np.unique(copies + 1, return_counts=True)
        return {str(size): int(count) for size, count in zip(sizes, clusters, strict=True)}


def find_copies(
    rows: Iterable[tuple[int, bytes, float]], folder: Path, candidates: Candidates, distance: Distance
) -> Copies:
    """Rows are compared with rows of as many images, image by image. Some 40 bytes a row stay in memory, and as many
    for each pair that is near and not equal.

    Args:
        rows: number of images, their signatures one after the other, and score. A row without images has no copies.
        folder: where files of signatures go, which are removed.
        candidates: places of pairs that may be near, among signatures of images, (S, bytes) uint8.
        distance: of (P, bytes) and (P, bytes) uint8: (P,), infinite for what is not near.
    """
    files: dict[int, _SignatureFile] = {}
    try:
        place = -1
        for place, (images, signatures, score) in enumerate(rows):
            if images not in files:
                files[images] = _SignatureFile(folder / f"signatures-{images}", images)
            files[images].add(place, signatures, score)
        copies = Copies(np.full(place + 1, -1, dtype=np.int32), np.zeros(place + 1, dtype=np.float32))
        for images, file in files.items():
            if images:
                file.find_copies(copies, candidates, distance)
        return copies
    finally:
        for file in files.values():
            file.remove()


class _SignatureFile:
    """Signatures of rows with one number of images; those that are equal are there once."""

    def __init__(self, path: Path, images: int):
        self.images = images
        self.file = open(path, "wb")
        self.known = DiskMap()  # number of a signature, by its hash
        self.count = 0
        self.places, self.slots, self.scores = array("i"), array("i"), array("f")  # of each row

    def add(self, place: int, signature: bytes, score: float) -> None:
        slot = self.known.setdefault(hashlib.blake2b(signature, digest_size=16).hexdigest(), self.count)
        if slot == self.count:
            self.file.write(signature)
            self.count += 1
        self.places.append(place)
        self.slots.append(slot)
        self.scores.append(score)

    def find_copies(self, copies: Copies, candidates: Candidates, distance: Distance) -> None:
        """Fill in `copies` of these rows."""
        self.file.flush()
        signatures = np.memmap(self.file.name, dtype=np.uint8, mode="r").reshape(self.count, self.images, -1)
        places, slots = np.asarray(self.places), np.asarray(self.slots)
        # best first, of equals the earlier
        order = np.argsort(-np.asarray(self.scores), kind="stable").astype(np.int32)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order), dtype=np.int32)
        best = np.empty(self.count, dtype=np.int32)
        best[slots[order[::-1]]] = order[::-1]  # of rows with a signature, the last one written is the best
        rank = rank[best]
        del order
        center, apart = keep_best(_near(signatures, candidates, distance), rank)
        kept = best[center[slots]]
        copied = kept != np.arange(len(kept))
        copies.copy_of[places[copied]] = places[kept[copied]]
        copies.distance[places[copied]] = apart[slots[copied]]

    def remove(self) -> None:
        self.file.close()
        Path(self.file.name).unlink()


def _near(signatures: np.ndarray, candidates: Candidates, distance: Distance) -> Iterator[tuple[np.ndarray, ...]]:
    for first, second in candidates(signatures[:, 0]):
        apart = np.zeros(len(first))
        for image in range(signatures.shape[1]):
            apart = np.maximum(apart, distance(signatures[first, image], signatures[second, image]))
        near = np.isfinite(apart)
        yield first[near], second[near], apart[near]


def keep_best(pairs: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], rank: np.ndarray) -> Stars:
    """
    Args:
        pairs: places of two items that are near, and their distance, some at a time.
        rank: (N,) of each item; the lowest is the best.

    Returns:
        (N,) center of each item, itself where it is kept, and (N,) distance to it.
    """
    center, apart = np.arange(len(rank), dtype=np.int32), np.zeros(len(rank), dtype=np.float32)
    found = list(pairs)
    if not found:
        return center, apart
    first, second, distance = (np.concatenate(part) for part in zip(*found, strict=True))
    items, others, distance = np.append(first, second), np.append(second, first), np.append(distance, distance)
    order = np.argsort(rank[items], kind="stable")
    items, others, distance = items[order], others[order], distance[order]
    ends = np.flatnonzero(np.diff(items, append=-1)) + 1
    for start, end in zip(np.append(0, ends), ends, strict=False):
        if center[items[start]] == items[start]:
            free = center[others[start:end]] == others[start:end]
            center[others[start:end][free]] = items[start]
            apart[others[start:end][free]] = distance[start:end][free]
    return center, apart
