"""A deduplicator that drops rows whose images are near-duplicates under a CLIP, such as crops and edits.

    process:
      - image_embedding_deduplicator: {min_similarity: 0.95, prefer: image_text_similarity}

It takes and loads the same CLIP as the similarity filter.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS
from data_juicer.utils.model_utils import get_model

from dj2mgm.data.images import load_image
from dj2mgm.data.near_duplicates.clusters import Search

from .batched_image_text_similarity_filter import load_clip
from .near_duplicates import PIXELS, NearDeduplicator

NAME = "image_embedding_deduplicator"
ROUNDING = 0.01  # error of distances between unit vectors in float16


@OPERATORS.register_module(NAME)
class ImageEmbeddingDeduplicator(NearDeduplicator):
    """A deduplicator that keeps the best row of each group whose images have a cosine of at least `min_similarity`."""

    _accelerator = "cuda"

    def __init__(
        self,
        hf_clip: str = "openai/clip-vit-base-patch32",
        min_similarity: float = 0.95,
        prefer: str = PIXELS,
        batch_size: int = 128,
        *args,
        **kwargs,
    ):
        """Initialize the operator.

        Args:
            hf_clip: folder or hub id of a CLIP with safetensors weights.
            min_similarity: lowest cosine between the embeddings of near-duplicates. Look at the rows that a value
                drops before you trust it, since each CLIP has its own scale.
            prefer: name of a statistic that an earlier operator has measured. Of near-duplicates the row with the
                highest value is kept, and of equal ones the first. The default is the size of the images.
            batch_size: rows embedded together.
        """
        kwargs["memory"] = kwargs.get("memory") or "1500MB"  # like the similarity filter
        super().__init__(prefer, *args, batch_size=batch_size, **kwargs)
        if not 0 < min_similarity <= 1:
            raise ValueError(f"min_similarity must be above 0 and at most 1, found {min_similarity}")
        self.hf_clip = hf_clip  # part of the operator's fingerprint, which does not contain `model_key`
        self.min_similarity = min_similarity
        self.model_key = partial(load_clip, hf_clip)

    def sign(self, images: Sequence[str], rank: int | None) -> list[tuple[bytes, int]]:
        if not images:
            return []
        pixels = {}

        def load(path: str):
            image = load_image(path)
            pixels[path] = image.width * image.height
            return image

        embeddings = get_model(self.model_key, rank, self.use_cuda()).embed(images, load).astype(np.float16)
        return [(vector.tobytes(), pixels[path]) for vector, path in zip(embeddings, images, strict=True)]

    def candidates(self, signatures: np.ndarray, folder: Path) -> Search:
        from dj2mgm.data.near_duplicates.vectors import VectorIndex

        vectors = signatures.view(np.float16)
        reach = (2 - 2 * self.min_similarity) ** 0.5 + ROUNDING
        index = VectorIndex(vectors, folder)
        return lambda places: index.near(vectors[places], reach)

    def distance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return 1 − cosine, or infinity below `min_similarity`."""
        first, second = (vectors.view(np.float16).astype(np.float32) for vectors in (left, right))
        cosine = (first * second).sum(axis=1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
        return np.where(cosine >= self.min_similarity, 1 - cosine, np.inf)
