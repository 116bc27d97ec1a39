"""Deduplicators of rows with similar images.

    process:
      - image_near_deduplicator: {prefer: image_text_similarity}
      - image_embedding_deduplicator: {min_similarity: 0.95, prefer: image_text_similarity}

- `image_near_deduplicator` drops rows with the images of another row, scaled or encoded again. A few bits may differ,
  and a statistic decides which row is kept.
- `image_embedding_deduplicator` drops rows whose images are near-duplicates under a CLIP, such as crops and edits. It
  takes and loads the same CLIP as the similarity filter.

Data-Juicer's `image_deduplicator` needs imagededup and torchvision, compares perceptual hashes for equality and keeps
the first row.
"""

import base64
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from data_juicer.ops.base_op import OPERATORS, Deduplicator
from data_juicer.utils.constant import Fields
from data_juicer.utils.model_utils import get_model

from dj2mgm.data.images import load_image
from dj2mgm.data.near_duplicates import (
    CODE_BYTES,
    MAX_BITS,
    MAX_LEVELS,
    compute_distances,
    compute_signature,
    find_near_pairs,
)
from dj2mgm.errors import InputError
from dj2mgm.features.selection.duplicate_clusters import FindNear, find_near_duplicates
from dj2mgm.juicer.operators.batched_image_text_similarity_filter import CLIP_DESCRIPTION, DEFAULT_CLIP, load_clip
from dj2mgm.juicer.operators.declarations import DecidesLast, Decision, Rows, argument

PIXELS_STATISTIC = "image_pixels"  # stat: width times height, averaged over the row's images
SIGNATURES_COLUMN = "__dj__image_signatures"


class NearDeduplicator(DecidesLast, Deduplicator):
    """A deduplicator that computes image signatures and keeps the near-duplicate with the highest statistic `prefer`.

    Subclasses define signatures and their distance.
    """

    _batched_op = True
    column = SIGNATURES_COLUMN
    report_key = "copies"

    # of near-duplicates the row with the highest value is kept, and of equal ones the first
    prefer: str = argument(PIXELS_STATISTIC, "statistic of an earlier operator; by default the size of the images")

    @abstractmethod
    def sign(self, images: Sequence[str], rank: int | None) -> list[tuple[bytes, int]]:
        """Return the signature (a fixed number of bytes) and the number of pixels of each image."""

    @abstractmethod
    def make_near_search(self, signatures: np.ndarray, folder: Path) -> FindNear:
        """Return a function from (Q,) positions to batches of pairs that may be near (index in Q, position).

        `signatures` are (N, bytes) uint8, a file mapped into memory.
        """

    @abstractmethod
    def compute_distances(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the (P,) distances of signatures (P, bytes) and (P, bytes), infinite for pairs that are not near."""

    def compute_hash(self, samples: dict, rank: int | None = None) -> dict:
        """Add signatures, and the stat `image_pixels`."""
        stats = samples.setdefault(Fields.stats, [{} for _ in samples[self.text_key]])
        rows = [images or [] for images in samples[self.image_key]]
        signed = iter(self.sign([image for images in rows for image in images], rank))
        samples[SIGNATURES_COLUMN] = []
        for images, values in zip(rows, stats, strict=True):
            signatures, pixels = zip(*(next(signed) for _ in images), strict=True) if images else ((), ())
            samples[SIGNATURES_COLUMN].append(f"{len(images)} {base64.b64encode(b''.join(signatures)).decode()}")
            values[PIXELS_STATISTIC] = float(np.mean(pixels)) if images else 0.0
            if self.prefer not in values:
                raise InputError(
                    f"operator {self._name}: 'prefer' names the statistic {self.prefer!r}, but rows only have "
                    f"{', '.join(values)}. Put the filter that measures it before this operator"
                )
        return samples

    def decide(self, rows: Rows, folder: Path) -> Decision:
        search = partial(self.make_near_search, folder=folder)
        duplicates = find_near_duplicates(map(self._read_signed_row, rows), folder, search, self.compute_distances)
        self.report = {"clusters": duplicates.count_clusters()}
        return Decision(duplicates.copy_of < 0, copy_of=duplicates.copy_of, distance=duplicates.distance)

    def _read_signed_row(self, row: dict) -> tuple[int, bytes, float]:
        images, signatures = row[SIGNATURES_COLUMN].split(" ")
        value = row[Fields.stats][self.prefer]
        values = np.asarray([] if value is None else value, dtype=np.float64)
        score = float(values.mean()) if values.size else -np.inf
        return int(images), base64.b64decode(signatures), -np.inf if np.isnan(score) else score


@OPERATORS.register_module("image_near_deduplicator")
class ImageNearDeduplicator(NearDeduplicator):
    """A deduplicator that keeps the best row of each group with the same images in any size and encoding.

    Two images are the same if at most `max_bits` of 256 bits of their perceptual hashes differ, and if their mean
    colors differ by at most `max_levels` in each cell of a 4 × 4 grid.
    """

    max_bits: int = argument(MAX_BITS, "bits that may differ, at most 23")
    max_levels: int = argument(MAX_LEVELS, "levels (out of 256) by which colors may differ")

    def sign(self, images: Sequence[str], rank: int | None) -> list[tuple[bytes, int]]:
        signed = []
        for path in images:
            image = load_image(path)
            signed.append((compute_signature(image).tobytes(), image.width * image.height))
        return signed

    def make_near_search(self, signatures: np.ndarray, folder: Path) -> FindNear:
        codes = signatures[:, :CODE_BYTES]
        return lambda positions: (
            (query, position) for query, position, _ in find_near_pairs(codes, codes, self.max_bits, folder, positions)
        )

    def compute_distances(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the number of different bits, or infinity for images that are not the same."""
        return compute_distances(left, right, self.max_bits, self.max_levels)


CELLS_FACTOR = 4  # cells divided by √vectors; finding the nearest cells then takes as long as searching in them
SEARCHED_CELLS = 8  # per query
TRAINING_PER_CELL = 39  # vectors for the centroid of each cell, as Faiss recommends
MAX_TRAINING_VECTORS = 10_000  # they are held in memory; for many cells, fewer than TRAINING_PER_CELL suffice
ITERATIONS = 5
VECTORS_AT_ONCE = 1024


class VectorIndex:
    """Index of vectors in a file, an inverted file of Faiss that finds vectors within a distance of query vectors.

    Each vector belongs to the cell of its nearest centroid. A query is compared with all vectors of its nearest cells
    only. The file holds float16.

    Args:
        vectors: (N, D) floats, possibly memory-mapped.
        folder: folder for a temporary file as large as the vectors. Its name is removed as soon as the file is open.
    """

    def __init__(self, vectors: np.ndarray, folder: Path):
        logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # less would log the detected CPU instructions
        import faiss  # imported here, because no other operator needs it

        count, dimensions = vectors.shape
        cells = int(max(1, min(CELLS_FACTOR * count**0.5, count / TRAINING_PER_CELL)))
        self.index = faiss.index_factory(dimensions, f"IVF{cells},SQfp16", faiss.METRIC_L2)
        self.index.cp.niter, self.index.cp.min_points_per_centroid = ITERATIONS, 1
        self.index.nprobe = SEARCHED_CELLS
        spread = np.linspace(0, count - 1, min(count, TRAINING_PER_CELL * cells, MAX_TRAINING_VECTORS)).astype(int)
        self.index.train(_to_floats(vectors[spread]))
        with TemporaryDirectory(dir=folder) as temporary, _silent():
            self.lists = faiss.OnDiskInvertedLists(cells, self.index.code_size, f"{temporary}/cells")
            self.index.replace_invlists(self.lists)
            for start in range(0, count, VECTORS_AT_ONCE):
                self.index.add(_to_floats(vectors[start : start + VECTORS_AT_ONCE]))

    def find_near(self, queries: np.ndarray, distance: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield indices of queries and of vectors within the distance of each other, in batches."""
        for start in range(0, len(queries), VECTORS_AT_ONCE):
            ends, _, vector_indices = self.index.range_search(
                _to_floats(queries[start : start + VECTORS_AT_ONCE]), distance**2
            )
            yield start + np.repeat(np.arange(len(ends) - 1), np.diff(ends.astype(np.int64))), vector_indices


def _to_floats(vectors: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(vectors, dtype=np.float32)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence Faiss, which prints each growth of its file."""
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)


DISTANCE_TOLERANCE = 0.01  # error of distances between unit vectors in float16


@OPERATORS.register_module("image_embedding_deduplicator")
class ImageEmbeddingDeduplicator(NearDeduplicator):
    """A deduplicator that keeps the best row of each group whose images have a cosine of at least `min_similarity`."""

    _accelerator = "cuda"

    hf_clip: str = argument(DEFAULT_CLIP, CLIP_DESCRIPTION)
    # look at the rows that a value drops before you trust it, since each CLIP has its own scale
    min_similarity: float = argument(0.95, "lowest cosine between the embeddings of near-duplicates")
    batch_size: int = argument(128, "rows embedded together")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_key = partial(load_clip, self.hf_clip)

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

    def make_near_search(self, signatures: np.ndarray, folder: Path) -> FindNear:
        vectors = signatures.view(np.float16)
        reach = (2 - 2 * self.min_similarity) ** 0.5 + DISTANCE_TOLERANCE
        index = VectorIndex(vectors, folder)
        return lambda positions: index.find_near(vectors[positions], reach)

    def compute_distances(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return 1 − cosine, or infinity below `min_similarity`."""
        first, second = (vectors.view(np.float16).astype(np.float32) for vectors in (left, right))
        cosine = (first * second).sum(axis=1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
        return np.where(cosine >= self.min_similarity, 1 - cosine, np.inf)
