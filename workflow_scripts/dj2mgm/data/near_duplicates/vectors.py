"""Vectors within a distance of others, by Faiss: in cells around centroids, of which the nearest ones are searched.

Faiss keeps the cells in a file (in float16), so that a vector takes no memory, and compares all vectors of a cell.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # it tells which instructions it looks for

import faiss  # noqa: E402

CELLS = 4  # times the square root of the number of vectors: a search then takes as long for cells as for vectors
PROBES = 8  # cells that are searched
TRAINING = 39  # vectors for each cell, as Faiss wants it
SAMPLE = 10_000  # vectors that are held for that, at most: a cell needs no center of its own to be searched
ITERATIONS = 5
BLOCK = 1024  # vectors at a time


class VectorIndex:
    """
    Args:
        vectors: (N, D) floats, perhaps a file mapped into memory.
        folder: where a file of the vectors' size goes; it has no name once it is open.
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
        """(place of a query, place of a vector) within the distance of each other, some at a time."""
        for start in range(0, len(queries), BLOCK):
            ends, _, found = self.index.range_search(_floats(queries[start : start + BLOCK]), distance**2)
            yield start + np.repeat(np.arange(len(ends) - 1), np.diff(ends.astype(np.int64))), found


def _floats(vectors: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(vectors, dtype=np.float32)


@contextmanager
def _silent() -> Iterator[None]:
    """Faiss prints each growth of its file."""
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)
