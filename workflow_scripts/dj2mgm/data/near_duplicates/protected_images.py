"""Search for images that are near-duplicates of the images of another set, such as a benchmark.

references = ReferenceImages(benchmark_images, processes=2)
for image, reference, bits in references.find_matches(training_images, processes=2):
    print(f"{image} is a near-duplicate of {reference}: {bits} of 256 bits differ")
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from dj2mgm.data.images import load_image
from dj2mgm.data.near_duplicates.image_signatures import (
    CODE_BYTES,
    MAX_BITS,
    MAX_LEVELS,
    SIGNATURE_BYTES,
    compute_distances,
    compute_signature,
)
from dj2mgm.data.near_duplicates.multi_index_hashing import find_near_pairs
from dj2mgm.storage.streaming import map_in_order

IMAGES_AT_ONCE = 10_000


class ReferenceImages:
    """Signatures of reference images, 80 bytes each; an image that cannot be read raises BadImageError."""

    def __init__(self, paths: Iterable[str | Path], processes: int = 1):
        self.paths = list(paths)
        self.signatures = _compute_signatures(self.paths, processes)

    def find_matches(
        self,
        images: Iterable[str | Path],
        processes: int = 1,
        max_bits: int = MAX_BITS,
        max_levels: int = MAX_LEVELS,
    ) -> Iterator[tuple[str | Path, str | Path, int]]:
        """Yield each near-duplicate of a reference in order: the image, its nearest reference, and the differing bits.

        `images` may be any number of files; `IMAGES_AT_ONCE` signatures at a time are in memory. The limits are the
        limits of the operator `image_near_deduplicator`. An image that cannot be read raises BadImageError.
        """
        images = iter(images)
        while block := list(islice(images, IMAGES_AT_ONCE)):
            signatures = _compute_signatures(block, processes)
            nearest: dict[int, tuple] = {}  # index → (bits, reference)
            for index, reference, differing in find_reference_pairs(signatures, self.signatures, max_bits, max_levels):
                nearest[index] = min(nearest.get(index, (differing, reference)), (differing, reference))
            for index, (differing, reference) in sorted(nearest.items()):
                yield block[index], self.paths[reference], int(differing)


def find_reference_pairs(
    signatures: np.ndarray, references: np.ndarray, max_bits: int = MAX_BITS, max_levels: int = MAX_LEVELS
) -> Iterator[tuple[int, int, int]]:
    """Yield every pair of an image and a reference within the limits: their indices, and the differing bits.

    Args:
        signatures, references: (N, SIGNATURE_BYTES) and (M, SIGNATURE_BYTES) uint8.
        max_bits, max_levels: limits, as in the operator `image_near_deduplicator`.
    """
    codes, reference_codes = (np.ascontiguousarray(rows[:, :CODE_BYTES]) for rows in (signatures, references))
    for indices, reference_indices, _ in find_near_pairs(codes, reference_codes, max_bits):
        bits = compute_distances(signatures[indices], references[reference_indices], max_bits, max_levels)
        near = np.isfinite(bits)
        yield from zip(
            indices[near].tolist(), reference_indices[near].tolist(), bits[near].astype(int).tolist(), strict=True
        )


def _compute_signatures(paths: list, processes: int) -> np.ndarray:
    signatures = np.empty((len(paths), SIGNATURE_BYTES), dtype=np.uint8)
    for index, signature in enumerate(map_in_order(_sign, paths, processes)):
        signatures[index] = signature
    return signatures


def _sign(path: str | Path) -> np.ndarray:
    return compute_signature(load_image(path))
