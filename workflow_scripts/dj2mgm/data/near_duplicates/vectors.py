"""Finds vectors within a distance of others with Faiss: cells around centroids; only the nearest are searched.

Faiss stores the cells in a file (in float16), so that vectors take no memory, and compares all vectors of a cell.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # it logs the CPU instructions that it looks for

import faiss  # noqa: E402

CELLS = 4  # number of cells per √vectors; finding cells then takes as long as searching them
PROBES = 8  # number of cells searched
TRAINING = 39  # vectors per cell, as Faiss recommends
SAMPLE = 10_000  # most training vectors in memory; fewer than TRAINING per cell suffice
ITERATIONS = 5
BLOCK = 1024  # vectors per batch


class VectorIndex:
    """Index of vectors in a file.

    Args:
        vectors: (N, D) floats, possibly memory-mapped.
        folder: folder of a file of the vectors' size, which is removed as soon as it is open.
    """

    def __init__(self, vectors: np.ndarray, folder: Path):
        count, dimensions = vectors.shape
        cells = int(max(1, min(CELLS * count**0.5, count / TRAINING)))
        self.index = faiss.index_factory(dimensions, f"IVF{cells},SQfp16", faiss.METRIC_L2)
        self.index.cp.niter, self.index.cp.min_points_per_centroid = ITERATIONS, 1
        self.index.nprobe = PROBES
        spread = np.linspace(0, count - 1, min(count, TRAINING * cells, SAMPLE)).astype(int)
        self.index.train(_floats(vectors[spread]))
        with TemporaryDirectory(dir=folder) as temporary, _silent():
            self.lists = faiss.OnDiskInvertedLists(cells, self.index.code_size, f"{temporary}/cells")
            self.index.replace_invlists(self.lists)
            for start in range(0, count, BLOCK):
                self.index.add(_floats(vectors[start : start + BLOCK]))

    def near(self, queries: np.ndarray, distance: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield places of queries and of vectors within the distance of each other, in batches."""
        for start in range(0, len(queries), BLOCK):
            ends, _, found = self.index.range_search(_floats(queries[start : start + BLOCK]), distance**2)
            yield start + np.repeat(np.arange(len(ends) - 1), np.diff(ends.astype(np.int64))), found


def _floats(vectors: np.ndarray) -> np.ndarray:
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
