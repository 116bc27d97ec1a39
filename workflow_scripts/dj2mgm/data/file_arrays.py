"""Arrays that live in files without a name rather than in memory: for what must be known of every row."""

import os
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import DTypeLike


def file_array(length: int, dtype: DTypeLike, folder: Path | None = None) -> np.ndarray:
    """(length,) zeros in a file that is mapped into memory, which the kernel writes out where memory is short.

    Args:
        folder: where the file has its place; None: where temporary files are.

    Raises:
        OSError: the disk has no room for it.
    """
    if not length:
        return np.zeros(0, dtype)
    with TemporaryFile(dir=folder) as file:
        # a page that the disk has no room for would end the process without a word
        os.posix_fallocate(file.fileno(), 0, length * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, mode="r+", shape=(length,))
