"""Data-Juicer's `image_text_similarity_filter`, computed on many rows at a time.

Arguments, stat and values (within 1e-3) are the same, so a recipe only changes the name of the operator:

    process:
      - batched_image_text_similarity_filter: {hf_clip: openai/clip-vit-base-patch32, min_score: 0.28}

Instead of `min_score`, `keep_fraction` keeps a share of the rows, most similar first, and `lower_quantile` and
`upper_quantile` keep a window of the scores.

It differs from Data-Juicer's filter in four points:
- It reads weights from safetensors and computes in float32 for every checkpoint. It never runs remote code.
- It accepts only models of the type `clip`.
- It opens images like the rest of this workflow, for example with 16 bits scaled to 8.
- It does not share decoded images with other operators, so `op_fusion` does not include it.

Like all of Data-Juicer's filters, it keeps a stat that a row already has. A second similarity filter in a recipe
therefore judges by the scores of the first, even if it names another CLIP.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.constant import Fields, StatsKeys
from data_juicer.utils.mm_utils import SpecialTokens, load_mm_bytes_from_sample, remove_special_tokens
from data_juicer.utils.model_utils import get_model
from PIL import Image, ImageOps

from dj2mgm.data.images import load_image
from dj2mgm.data.score_limits import ORIGINAL_SIMILARITY

from .declarations import ShareFilter, argument

NAME = "batched_image_text_similarity_filter"
DEFAULT_CLIP = "openai/clip-vit-base-patch32"
CLIP_DESCRIPTION = "folder or hub id of a CLIP with safetensors weights"
MIN_SCORE, LOWEST_COSINE = 0.1, -1.0  # Data-Juicer's default; the lowest possible cosine
REDUCTIONS = {"avg": np.mean, "max": np.max, "min": np.min}
COMBINATIONS = {"any": any, "all": all}


def load_clip(hf_clip: str, device: str):
    from dj2mgm.juicer.clip_similarity import ClipSimilarity  # here because it imports torch and transformers

    return ClipSimilarity(hf_clip, device)


def iterate_text_chunks(text: str) -> Iterator[tuple[str, slice]]:
    """Yield each chunk of the text that has image tokens, without special tokens, and the slice of its images."""
    start = 0
    for chunk in text.split(SpecialTokens.eoc):
        count = chunk.count(SpecialTokens.image)
        if count:
            yield remove_special_tokens(chunk), slice(start, start + count)
        start += count


@OPERATORS.register_module(NAME)
class BatchedImageTextSimilarityFilter(ShareFilter):
    """A filter that keeps rows whose image-text similarity under a CLIP lies in a range, and scores whole batches.

    The stat `image_text_similarity` holds one score for each chunk of the text that has images. The scores of several
    images are reduced to one. A row without images has no score and is kept.
    """

    _accelerator = "cuda"
    _batched_op = True
    limit = "min_score"
    quantiles = {"lower_quantile": "min_score", "upper_quantile": "max_score"}

    hf_clip: str = argument(DEFAULT_CLIP, CLIP_DESCRIPTION)
    min_score: float | None = argument(None, "lowest similarity to keep. Without a share it is Data-Juicer's 0.1")
    max_score: float = argument(1.0, "highest similarity to keep")
    horizontal_flip: bool = argument(False, "mirror images left to right before scoring")
    vertical_flip: bool = argument(False, "mirror images top to bottom before scoring")
    any_or_all: str = argument("any", "keep a row if 'any' of its chunks, or only if 'all' of them, lie in the range")
    reduce_mode: str = argument("avg", "'avg', 'max' or 'min' of the scores of a chunk with several images")
    # it is a share of the original captions, and rewritten captions must reach the same limit
    keep_fraction: float | None = argument(None, "share of the rows, most similar first, in place of `min_score`")
    lower_quantile: float | None = argument(None, "share of rows to drop as least similar, in place of `min_score`")
    upper_quantile: float | None = argument(None, "share of rows up to the limit that replaces `max_score`")
    batch_size: int = argument(128, "rows scored together. Memory grows with it; scores do not depend on it")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.min_score is None:
            self.min_score = LOWEST_COSINE if self.shares else MIN_SCORE
        self.model_key = partial(load_clip, self.hf_clip)

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows that have no score yet."""
        scores = {
            row: [] for row, stats in enumerate(samples[Fields.stats]) if StatsKeys.image_text_similarity not in stats
        }
        chunks = [(row, text, images) for row in scores for text, images in self._read_chunks(samples, row)]
        if chunks:
            similarity = get_model(self.model_key, rank, self.use_cuda())
            texts = [text for _, text, images in chunks for _ in images]
            values = similarity(texts, [image for *_, images in chunks for image in images], self._load)
            ends = np.cumsum([len(images) for *_, images in chunks])
            for (row, *_), chunk in zip(chunks, np.split(values, ends[:-1]), strict=True):
                scores[row].append(float(REDUCTIONS[self.reduce_mode](chunk)))
        for row, values in scores.items():
            samples[Fields.stats][row][StatsKeys.image_text_similarity] = np.array(values, dtype=np.float64)
        return samples

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        """Return the scores of the original caption."""
        return stats.get(ORIGINAL_SIMILARITY) or stats[StatsKeys.image_text_similarity]

    def process_single(self, sample: dict) -> bool:
        scores = sample[Fields.stats][StatsKeys.image_text_similarity]
        in_range = [self.get_keep_boolean(score, self.min_score, self.max_score) for score in scores]
        return not in_range or COMBINATIONS[self.any_or_all](in_range)

    def _read_chunks(self, samples: dict, row: int) -> Iterator[tuple[str, list[str | bytes]]]:
        """Yield the row's chunks: the text, and each image as encoded bytes if the row has them, or as a path."""
        paths = samples[self.image_key][row] if self.image_key in samples else None
        if not paths:
            return
        images = [
            load_mm_bytes_from_sample(samples, index, self.image_bytes_key, row) or path
            for index, path in enumerate(paths)
        ]
        for text, positions in iterate_text_chunks(samples[self.text_key][row]):
            if not images[positions]:
                raise ValueError(
                    f"the text has at least {positions.stop} image tokens, but the row has {len(images)} images"
                )
            yield text, images[positions]

    def _load(self, image: str | bytes) -> Image.Image:
        image = load_image(image)
        if self.horizontal_flip:
            image = ImageOps.mirror(image)
        if self.vertical_flip:
            image = ImageOps.flip(image)
        return image
