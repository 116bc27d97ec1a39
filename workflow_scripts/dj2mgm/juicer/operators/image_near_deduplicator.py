"""Drops rows whose images are those of another row, encoded again or scaled.

    process:
      - image_near_deduplicator: {prefer: image_text_similarity}

Data-Juicer's `image_deduplicator` keeps the first row of those with one and the same perceptual hash, and needs
imagededup and torchvision; here a few bits may differ, and a statistic decides which row is kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS

from dj2mgm.data.images import load_image
from dj2mgm.data.near_codes import near_pairs
from dj2mgm.data.near_copies import Search
from dj2mgm.data.perceptual_hash import CODE, MAX_BITS, MAX_LEVELS, distance, signature_of

from .near_duplicates import PIXELS, NearDeduplicator

NAME = "image_near_deduplicator"


@OPERATORS.register_module(NAME)
class ImageNearDeduplicator(NearDeduplicator):
    """Keeps the best row of each group with the same pictures, whatever their size and encoding.

    Pictures are the same if at most `max_bits` of 256 bits of a perceptual hash differ and, in no cell of a 4 × 4 grid,
    the mean color by more than `max_levels`.
    """

    def __init__(self, prefer: str = PIXELS, max_bits: int = MAX_BITS, max_levels: int = MAX_LEVELS, *args, **kwargs):
        """
        Initialization method.

        :param prefer: name of a statistic that the recipe has measured by then; of rows that are copies of each other
            the one with the highest value is kept, and of equal ones the first. The default is the images' size.
        :param max_bits: bits that may differ, at most 23.
        :param max_levels: levels (of 256) by which colors may differ.
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
            signed.append((signature_of(image).tobytes(), image.width * image.height))
        return signed

    def candidates(self, signatures: np.ndarray, folder: Path) -> Search:
        codes = signatures[:, :CODE]
        return lambda places: (
            (query, place) for query, place, _ in near_pairs(codes, codes, self.max_bits, folder, places)
        )

    def distance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Bits that differ."""
        return distance(left, right, self.max_bits, self.max_levels)
