"""A filter that drops rows whose image is missing, outside the image folder, empty or undecodable.

Put it first in a recipe. Data-Juicer's own image operators raise an error on such rows instead of dropping them.
"""

from collections import Counter

from data_juicer.ops.base_op import OPERATORS, Filter
from data_juicer.utils.constant import Fields

from dj2mgm.data.images import BadImageError, load_image, locate_image

from .declarations import Declarations, argument, merge_reports

NAME = "image_integrity_filter"
STAT = "image_integrity"
OK = "ok"


def classify_image_integrity(images: list[str], image_root: str) -> str:
    """Return `ok`, or the reason (one of `BadImageError.REASONS`) why the first unusable image cannot be used."""
    try:
        for image in images:
            load_image(locate_image(image_root, image))
    except BadImageError as error:
        return error.reason
    return OK


@OPERATORS.register_module(NAME)
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
