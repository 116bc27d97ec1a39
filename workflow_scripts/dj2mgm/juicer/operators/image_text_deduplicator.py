"""A deduplicator that drops rows with the same image files and text, byte for byte, as an earlier row.

process:
- image_text_deduplicator:
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS, Deduplicator

from dj2mgm.storage.image_files import read_file
from dj2mgm.storage.streaming import DiskMap

from .declarations import DecidesLast, Decision, Rows

IMAGE_TEXT = "image_text_deduplicator"
HASH_COLUMN = "__dj__image_text_hash"


def compute_image_text_hash(images: Sequence[str], text: str) -> str:
    """Return the SHA-256 over the number of images, the SHA-256 of each file, and the text."""
    digest = hashlib.sha256(len(images).to_bytes(8, "big"))
    for image in images:
        digest.update(hashlib.sha256(read_file(image)).digest())
    digest.update(text.encode())
    return digest.hexdigest()


@OPERATORS.register_module(IMAGE_TEXT)
class ImageTextDeduplicator(DecidesLast, Deduplicator):
    """A deduplicator that keeps the first row of each group with equal image bytes and equal text."""

    _batched_op = True
    column = HASH_COLUMN

    def compute_hash(self, samples: dict) -> dict:
        pairs = zip(samples[self.image_key], samples[self.text_key], strict=True)
        samples[HASH_COLUMN] = [compute_image_text_hash(images or [], text) for images, text in pairs]
        return samples

    def decide(self, rows: Rows, folder: Path) -> Decision:
        first_rows = DiskMap()  # by hash
        repeats = (first_rows.setdefault(row[HASH_COLUMN], number) == number for number, row in enumerate(rows))
        return Decision(np.fromiter(repeats, dtype=bool, count=len(rows)))
