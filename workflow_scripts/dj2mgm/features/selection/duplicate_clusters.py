"""Clusters of near-duplicates with one kept row each.

Each cluster is a star: every duplicate is near the kept row in its center, and no two kept rows are near each other.
A cluster of rows that are each near the next one could contain rows that do not resemble the kept one.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.data.near_duplicates import allocate_file_array
from dj2mgm.storage.streaming import DiskMap

Pairs = Iterable[tuple[np.ndarray, ...]]  # (P,) each, in batches
FindNear = Callable[[np.ndarray], Pairs]
Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
Stars = tuple[np.ndarray, np.ndarray]
FIRST_ITEMS, MAX_ITEMS = 1 << 13, 1 << 20  # number of items searched for at once, at first and at most
MAX_PAIRS_IN_MEMORY = 1 << 20  # pairs in memory, unless a single item has more
ROW_DTYPE = np.dtype([("position", "<i4"), ("slot", "<i4"), ("score", "<f4")])
PACKED_ROW = struct.Struct("<iif")


@dataclass(frozen=True)
class NearDuplicates:
    """Near-duplicates among rows."""

    copy_of: np.ndarray  # (N,) int32, position of the kept row that a row duplicates; -1 for a kept row
    distance: np.ndarray  # (N,) float32, distance between the two

    def count_clusters(self) -> dict[str, int]:
        """Return the number of clusters by size; a kept row counts."""
        _, copies = np.unique(self.copy_of[self.copy_of >= 0], return_counts=True)
        sizes, clusters = np.unique(copies + 1, return_counts=True)
        return {str(size): int(count) for size, count in zip(sizes, clusters, strict=True)}


def find_near_duplicates(
    rows: Iterable[tuple[int, bytes, float]],
    folder: Path,
    candidates: Callable[[np.ndarray], FindNear],
    distance: Distance,
) -> NearDuplicates:
    """Find near-duplicates among rows with the same number of images, compared image by image.

    Args:
        rows: number of images, their concatenated signatures, and score. A row without images has no duplicates.
        folder: folder of temporary files with the data of all rows.
        candidates: function from the images' signatures, (S, bytes) uint8, to a search: (Q,) positions → batches of
            pairs that may be near, as the index in Q and the position.
        distance: function from (P, bytes) and (P, bytes) uint8 to (P,) distances, infinite for pairs that are not
            near.
    """
    files: dict[int, _SignatureFile] = {}
    try:
        position = -1
        for position, (images, signatures, score) in enumerate(rows):
            if images not in files:
                files[images] = _SignatureFile(folder, images)
            files[images].add(position, signatures, score)
        copies = NearDuplicates(
            allocate_file_array(position + 1, np.int32, folder), allocate_file_array(position + 1, np.float32, folder)
        )
        copies.copy_of[:] = -1
        for images, file in files.items():
            if images:
                file.find_near_duplicates(copies, candidates, distance)
        return copies
    finally:
        for file in files.values():
            file.remove()


class _SignatureFile:
    """Files of the signatures of rows with the same number of images; equal signatures are stored once."""

    def __init__(self, folder: Path, images: int):
        self.folder, self.images = folder, images
        self.file = open(folder / f"signatures-{images}", "wb")
        self.rows = open(folder / f"rows-{images}", "wb")
        self.slots = DiskMap()  # numbers of signatures by their hash
        self.count = 0

    def add(self, position: int, signature: bytes, score: float) -> None:
        slot = self.slots.setdefault(hashlib.blake2b(signature, digest_size=16).hexdigest(), self.count)
        if slot == self.count:
            self.file.write(signature)
            self.count += 1
        self.rows.write(PACKED_ROW.pack(position, slot, score))

    def find_near_duplicates(self, copies: NearDuplicates, candidates: Callable, distance: Distance) -> None:
        """Fill in the near-duplicates of these rows."""
        self.file.flush()
        self.rows.flush()
        signatures = np.memmap(self.file.name, dtype=np.uint8, mode="r").reshape(self.count, self.images, -1)
        rows = np.memmap(self.rows.name, dtype=ROW_DTYPE, mode="r")
        positions, slots = rows["position"], rows["slot"]
        # row and rank of each signature
        best, rank = (allocate_file_array(self.count, np.int32, self.folder) for _ in range(2))
        order = allocate_file_array(len(rows), np.int32, self.folder)
        order[:] = np.argsort(-rows["score"], kind="stable")  # best first; the earlier of equal scores
        for start in range(0, len(order), MAX_ITEMS)[::-1]:
            part = order[start : start + MAX_ITEMS][::-1]
            best[slots[part]] = part  # the best row of a signature is written last
            rank[slots[part]] = np.arange(start, start + len(part))[::-1]
        del order
        center, distances = keep_best(_search(signatures, candidates, distance), rank, self.folder)
        for start in range(0, len(rows), MAX_ITEMS):
            part = slice(start, start + MAX_ITEMS)
            kept_rows = best[center[slots[part]]]
            copied = kept_rows != np.arange(start, start + len(kept_rows))
            copies.copy_of[positions[part][copied]] = positions[kept_rows[copied]]
            copies.distance[positions[part][copied]] = distances[slots[part][copied]]

    def remove(self) -> None:
        for file in (self.file, self.rows):
            file.close()
            Path(file.name).unlink()


def _search(signatures: np.ndarray, candidates: Callable[[np.ndarray], FindNear], distance: Distance) -> FindNear:
    search = candidates(signatures[:, 0])

    def near(positions: np.ndarray) -> Pairs:
        for first, second in search(positions):
            largest = np.zeros(len(first))
            for image in range(signatures.shape[1]):
                largest = np.maximum(largest, distance(signatures[positions[first], image], signatures[second, image]))
            mask = np.isfinite(largest)
            yield first[mask], second[mask], largest[mask]

    return near


def keep_best(near: FindNear, rank: np.ndarray, folder: Path | None = None) -> Stars:
    """Keep the best item and mark its near items as duplicates; repeat with the best of the others.

    Items are processed best first, in batches, and duplicates are skipped. So if many items are all near each other,
    their pairs, a quadratic number, are never all searched for.

    Args:
        near: search, (Q,) positions → pairs that are near, as the index in Q, the position, and the distance.
        rank: (N,) rank of each item; the lowest is the best.

    Returns:
        (N,) center of each item, which is itself for a kept item, and (N,) distance to it.
    """
    center, order = (allocate_file_array(len(rank), np.int32, folder) for _ in range(2))
    distances = allocate_file_array(len(rank), np.float32, folder)
    center[:], order[:] = np.arange(len(rank), dtype=np.int32), np.argsort(rank)
    start, size = 0, FIRST_ITEMS
    while start < len(order):
        part = order[start : start + size]
        pairs = _find_pairs(near, part[center[part] == part], center, rank)
        if pairs is None:
            size = max(1, size // 4)
            continue
        items, others, distance = pairs
        ends = np.flatnonzero(np.diff(items, append=-1)) + 1
        for begin, end in zip(np.append(0, ends), ends, strict=False):
            if center[items[begin]] == items[begin]:
                free = center[others[begin:end]] == others[begin:end]
                center[others[begin:end][free]] = items[begin]
                distances[others[begin:end][free]] = distance[begin:end][free]
        start, size = start + size, min(2 * size, MAX_ITEMS)
    return center, distances


def _find_pairs(
    near: FindNear, positions: np.ndarray, center: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, ...] | None:
    """Return pairs of a position and a near, unassigned, worse item, best first; None if they are too many."""
    batches, count = [(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0))], 0
    for first, second, distance in near(positions):
        items, others = positions[first], second.astype(np.int32)
        new = (center[others] == others) & (rank[others] > rank[items])
        batches.append((items[new], others[new], distance[new]))
        count += len(batches[-1][0])
        if count > MAX_PAIRS_IN_MEMORY and len(positions) > 1:
            return None
    items, others, distance = (np.concatenate(part) for part in zip(*batches, strict=True))
    best = np.argsort(rank[items], kind="stable")
    return items[best], others[best], distance[best]
