"""Search for vectors within a distance of query vectors, with an inverted file of Faiss.

Each vector belongs to the cell of its nearest centroid. A query is compared with all vectors of its nearest cells only.
The vectors are in a file, as float16, so that they take no memory.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # less would log the detected CPU instructions

import faiss  # noqa: E402

CELLS_FACTOR = 4  # cells divided by √vectors; finding the nearest cells then takes as long as searching in them
SEARCHED_CELLS = 8  # per query
TRAINING_PER_CELL = 39  # vectors for the centroid of each cell, as Faiss recommends
MAX_TRAINING_VECTORS = 10_000  # they are held in memory; for many cells, fewer than TRAINING_PER_CELL suffice
ITERATIONS = 5
VECTORS_AT_ONCE = 1024


class VectorIndex:
    """Index of vectors in a file.

    Args:
        vectors: (N, D) floats, possibly memory-mapped.
        folder: folder for a temporary file as large as the vectors. Its name is removed as soon as the file is open.
    """

    def __init__(self, vectors: np.ndarray, folder: Path):
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
