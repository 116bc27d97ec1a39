"""Arrays in memory-mapped files, for more rows than fit in memory."""

import os
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import DTypeLike


def allocate_file_array(length: int, dtype: DTypeLike, folder: Path | None = None) -> np.ndarray:
    """Return zeros of shape (length,) in a memory-mapped file, which the kernel writes out if memory is short.

    The file is in `folder`, or in the folder of temporary files. A full disk raises OSError.
    """
    if not length:
        return np.zeros(0, dtype)
    with TemporaryFile(dir=folder) as file:
        # without this, a full disk would kill the process at a later access
        os.posix_fallocate(file.fileno(), 0, length * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, mode="r+", shape=(length,))
