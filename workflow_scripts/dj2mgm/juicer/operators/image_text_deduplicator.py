"""A deduplicator that drops rows whose image files and text are equal, byte for byte, to those of an earlier row.

Data-Juicer's `image_deduplicator` compares perceptual hashes and needs imagededup and torchvision.
"""

import hashlib
from collections.abc import Sequence

from data_juicer.ops.base_op import OPERATORS

from dj2mgm.data.shards import read_file

from .batched_deduplicator import BatchedDeduplicator

NAME = "image_text_deduplicator"
HASH = "__dj__image_text_hash"


def image_text_hash(images: Sequence[str], text: str) -> str:
    """Return the SHA-256 over the number of images, the SHA-256 of each file, and the text."""
    digest = hashlib.sha256(len(images).to_bytes(8, "big"))
    for image in images:
        digest.update(hashlib.sha256(read_file(image)).digest())
    digest.update(text.encode())
    return digest.hexdigest()


@OPERATORS.register_module(NAME)
class ImageTextDeduplicator(BatchedDeduplicator):
    """A deduplicator that keeps the first row of each group with equal image bytes and equal text."""

    hash_key = HASH

    def compute_hash(self, samples: dict) -> dict:
        pairs = zip(samples[self.image_key], samples[self.text_key], strict=True)
        samples[HASH] = [image_text_hash(images or [], text) for images, text in pairs]
        return samples

    def process(self, dataset, show_num: int = 0) -> tuple:
        """Return the rows whose hash is new, in order, and up to `show_num` pairs (first row, later row)."""
        first, kept, pairs = {}, [], {}
        for position, value in enumerate(dataset[HASH]):
            if first.setdefault(value, position) == position:
                kept.append(position)
            elif len(pairs) < show_num:
                pairs.setdefault(value, [dataset[first[value]], dataset[position]])
        return dataset.select(kept), pairs
