"""Caption length as a metric.

Copied into workflow_scripts/dj2mgm/evaluation/caption_metrics.py. The last line of `CaptionJudge.compute_metrics` then
is

        return clip_metrics | measure_attributes(captions, self.rows) | length_metrics(captions, self.rows)
"""

from dj2mgm.evaluation.groups import Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements


def length_metrics(captions: list[str], rows: Rows) -> Metrics:
    """`caption_words`: the number of words of each caption."""
    words = [len(caption.split()) for caption in captions]
    return {"caption_words": Measurements.from_values(words, [row["image_id"] for row in rows])}
