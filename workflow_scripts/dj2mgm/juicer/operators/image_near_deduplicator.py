"""A deduplicator that drops rows whose images are those of another row, scaled or encoded again.

    process:
      - image_near_deduplicator: {prefer: image_text_similarity}

Data-Juicer's `image_deduplicator` needs imagededup and torchvision, compares perceptual hashes for equality and keeps
the first row. Here a few bits may differ, and a statistic decides which row is kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS

from dj2mgm.data.images import load_image
from dj2mgm.data.near_duplicates.binary_codes import find_near_pairs
from dj2mgm.data.near_duplicates.clusters import Search
from dj2mgm.data.near_duplicates.image_signatures import CODE, MAX_BITS, MAX_LEVELS, compute_signature, distance

from .near_duplicates import PIXELS, NearDeduplicator

NAME = "image_near_deduplicator"


@OPERATORS.register_module(NAME)
class ImageNearDeduplicator(NearDeduplicator):
    """A deduplicator that keeps the best row of each group with the same images in any size and encoding.

    Two images are the same if at most `max_bits` of 256 bits of their perceptual hashes differ, and if their mean
    colors differ by at most `max_levels` in each cell of a 4 × 4 grid.
    """

    def __init__(self, prefer: str = PIXELS, max_bits: int = MAX_BITS, max_levels: int = MAX_LEVELS, *args, **kwargs):
        """Initialize the operator.

        Args:
            prefer: name of a statistic that an earlier operator has measured. Of near-duplicates the row with the
                highest value is kept, and of equal ones the first. The default is the size of the images.
            max_bits: bits that may differ, at most 23.
            max_levels: levels (out of 256) by which colors may differ.
        """
        super().__init__(prefer, *args, **kwargs)
        if not 0 <= max_bits <= MAX_BITS:
            raise ValueError(f"max_bits must be from 0 to {MAX_BITS}, found {max_bits}")
        if max_levels < 0:
            raise ValueError(f"max_levels must be 0 or more, found {max_levels}")
        self.max_bits = max_bits
        self.max_levels = max_levels

    def sign(self, images: Sequence[str], rank: int | None) -> list[tuple[bytes, int]]:
        signed = []
        for path in images:
            image = load_image(path)
            signed.append((compute_signature(image).tobytes(), image.width * image.height))
        return signed

    def candidates(self, signatures: np.ndarray, folder: Path) -> Search:
        codes = signatures[:, :CODE]
        return lambda places: (
            (query, place) for query, place, _ in find_near_pairs(codes, codes, self.max_bits, folder, places)
        )

    def distance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the number of different bits, or infinity for images that are not the same."""
        return distance(left, right, self.max_bits, self.max_levels)
