"""Operators on a row's image files: exact copies, and images that cannot be read.

    process:
      - image_integrity_filter:
      - image_text_deduplicator:

Put the filter first in a recipe: it drops rows whose image is missing, outside the image folder, empty or undecodable.
Data-Juicer's own image operators raise an error on such rows instead of dropping them. The deduplicator drops rows with
the same image files and text, byte for byte, as an earlier row.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS, Deduplicator, Filter
from data_juicer.utils.constant import Fields

from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.storage.image_files import read_file
from dj2mgm.storage.streaming import DiskMap

from .declarations import DecidesLast, Decision, Declarations, Rows, argument, merge_reports

IMAGE_TEXT = "image_text_deduplicator"
HASH_COLUMN = "__dj__image_text_hash"
INTEGRITY_FILTER = "image_integrity_filter"
STAT = "image_integrity"
OK = "ok"


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


def classify_image_integrity(images: list[str], image_root: str) -> str:
    """Return `ok`, or the reason (one of `BadImageError.REASONS`) why the first unusable image cannot be used."""
    try:
        for image in images:
            load_image(locate_image(image_root, image))
    except BadImageError as error:
        return error.reason
    return OK


@OPERATORS.register_module(INTEGRITY_FILTER)
class ImageIntegrityFilter(Declarations, Filter):
    """A filter that keeps rows whose images all lie inside `image_root` and decode completely.

    The stat `image_integrity` is `ok`, `missing`, `outside`, `empty` or `undecodable`.
    """

    _batched_op = True
    unreadable_stat = STAT
    report_key = "broken_images"

    image_root: str = argument("/", "folder that all images must lie in. The default allows every folder")

    def compute_stats_batched(self, samples: dict) -> dict:
        for images, stats in zip(samples[self.image_key], samples[Fields.stats], strict=True):
            stats[STAT] = classify_image_integrity(images or [], self.image_root)
        return samples

    def process_batched(self, samples: dict) -> list[bool]:
        reasons = [stats[STAT] for stats in samples[Fields.stats]]
        self.report = merge_reports(self.report, Counter(reason for reason in reasons if reason != OK))
        return [reason == OK for reason in reasons]
