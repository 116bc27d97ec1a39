"""Which of many pictures are copies of which: of those that are near each other, the one with the best score is kept.

Kept pictures are the centers of stars: each copy is near the kept picture that it is a copy of, and no two kept ones
are near each other. (In a chain, with each near the next, a picture could stand for one that it does not resemble.)
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.data.file_arrays import file_array
from dj2mgm.streaming import DiskMap

Pairs = Iterable[tuple[np.ndarray, ...]]  # (P,) each, some at a time
Search = Callable[[np.ndarray], Pairs]
Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
Stars = tuple[np.ndarray, np.ndarray]
FIRST, MOST = 1 << 13, 1 << 20  # items whose neighbors are looked for together, at first and later
PAIRS = 1 << 20  # that are held, where these are not of one item
ROW = np.dtype([("place", "<i4"), ("slot", "<i4"), ("score", "<f4")])
PACKED = struct.Struct("<iif")


@dataclass(frozen=True)
class NearDuplicates:
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


def find_near_duplicates(
    rows: Iterable[tuple[int, bytes, float]],
    folder: Path,
    candidates: Callable[[np.ndarray], Search],
    distance: Distance,
) -> NearDuplicates:
    """Rows are compared with rows of as many images, image by image. What is known of each row is in files.

    Args:
        rows: number of images, their signatures one after the other, and score. A row without images has no copies.
        folder: where these files go, which are removed.
        candidates: among signatures of images, (S, bytes) uint8: (Q,) places → pairs that may be near, the number in Q
            and the place, some at a time.
        distance: of (P, bytes) and (P, bytes) uint8: (P,), infinite for what is not near.
    """
    files: dict[int, _SignatureFile] = {}
    try:
        place = -1
        for place, (images, signatures, score) in enumerate(rows):
            if images not in files:
                files[images] = _SignatureFile(folder, images)
            files[images].add(place, signatures, score)
        copies = NearDuplicates(file_array(place + 1, np.int32, folder), file_array(place + 1, np.float32, folder))
        copies.copy_of[:] = -1
        for images, file in files.items():
            if images:
                file.find_near_duplicates(copies, candidates, distance)
        return copies
    finally:
        for file in files.values():
            file.remove()


class _SignatureFile:
    """Signatures of rows with one number of images; those that are equal are there once."""

    def __init__(self, folder: Path, images: int):
        self.folder, self.images = folder, images
        self.file = open(folder / f"signatures-{images}", "wb")
        self.rows = open(folder / f"rows-{images}", "wb")
        self.known = DiskMap()  # number of a signature, by its hash
        self.count = 0

    def add(self, place: int, signature: bytes, score: float) -> None:
        slot = self.known.setdefault(hashlib.blake2b(signature, digest_size=16).hexdigest(), self.count)
        if slot == self.count:
            self.file.write(signature)
            self.count += 1
        self.rows.write(PACKED.pack(place, slot, score))

    def find_near_duplicates(self, copies: NearDuplicates, candidates: Callable, distance: Distance) -> None:
        """Fill in `copies` of these rows."""
        self.file.flush()
        self.rows.flush()
        signatures = np.memmap(self.file.name, dtype=np.uint8, mode="r").reshape(self.count, self.images, -1)
        rows = np.memmap(self.rows.name, dtype=ROW, mode="r")
        places, slots = rows["place"], rows["slot"]
        best, rank = (file_array(self.count, np.int32, self.folder) for _ in range(2))  # row, and rank, of a signature
        order = file_array(len(rows), np.int32, self.folder)
        order[:] = np.argsort(-rows["score"], kind="stable")  # best first, of equals the earlier
        for start in range(0, len(order), MOST)[::-1]:
            part = order[start : start + MOST][::-1]
            best[slots[part]] = part  # of rows with a signature, the last one written is the best
            rank[slots[part]] = np.arange(start, start + len(part))[::-1]
        del order
        center, apart = keep_best(_near(signatures, candidates, distance), rank, self.folder)
        for start in range(0, len(rows), MOST):
            part = slice(start, start + MOST)
            kept = best[center[slots[part]]]
            copied = kept != np.arange(start, start + len(kept))
            copies.copy_of[places[part][copied]] = places[kept[copied]]
            copies.distance[places[part][copied]] = apart[slots[part][copied]]

    def remove(self) -> None:
        for file in (self.file, self.rows):
            file.close()
            Path(file.name).unlink()


def _near(signatures: np.ndarray, candidates: Callable[[np.ndarray], Search], distance: Distance) -> Search:
    search = candidates(signatures[:, 0])

    def near(places: np.ndarray) -> Pairs:
        for first, second in search(places):
            apart = np.zeros(len(first))
            for image in range(signatures.shape[1]):
                apart = np.maximum(apart, distance(signatures[places[first], image], signatures[second, image]))
            found = np.isfinite(apart)
            yield first[found], second[found], apart[found]

    return near


def keep_best(near: Search, rank: np.ndarray, folder: Path | None = None) -> Stars:
    """The best item is kept, and what is near it is a copy; then the best of the others, and so on.

    Best first, some at a time, and only what is no copy yet: pairs of many items that are all near each other, as
    many as the square of their number, are never all looked for.

    Args:
        near: (Q,) places → pairs that are near: the number in Q, the place, and the distance.
        rank: (N,) of each item; the lowest is the best.
        folder: where files without a name go.

    Returns:
        (N,) center of each item, itself where it is kept, and (N,) distance to it.
    """
    center, order = (file_array(len(rank), np.int32, folder) for _ in range(2))
    apart = file_array(len(rank), np.float32, folder)
    center[:], order[:] = np.arange(len(rank), dtype=np.int32), np.argsort(rank)
    start, size = 0, FIRST
    while start < len(order):
        part = order[start : start + size]
        pairs = _pairs_of(near, part[center[part] == part], center, rank)
        if pairs is None:
            size = max(1, size // 4)
            continue
        items, others, distance = pairs
        ends = np.flatnonzero(np.diff(items, append=-1)) + 1
        for begin, end in zip(np.append(0, ends), ends, strict=False):
            if center[items[begin]] == items[begin]:
                free = center[others[begin:end]] == others[begin:end]
                center[others[begin:end][free]] = items[begin]
                apart[others[begin:end][free]] = distance[begin:end][free]
        start, size = start + size, min(2 * size, MOST)
    return center, apart


def _pairs_of(near: Search, places: np.ndarray, center: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, ...] | None:
    """Places with what is near them, worse, and no copy yet, best places first; None if that is too much at once."""
    found, count = [(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0))], 0
    for first, second, distance in near(places):
        items, others = places[first], second.astype(np.int32)
        new = (center[others] == others) & (rank[others] > rank[items])
        found.append((items[new], others[new], distance[new]))
        count += len(found[-1][0])
        if count > PAIRS and len(places) > 1:
            return None
    items, others, distance = (np.concatenate(part) for part in zip(*found, strict=True))
    best = np.argsort(rank[items], kind="stable")
    return items[best], others[best], distance[best]
