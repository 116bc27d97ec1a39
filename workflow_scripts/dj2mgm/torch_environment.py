"""Environment variables that PyTorch reads when it is imported. Entry points set them first."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def set_torch_environment() -> None:
    """Set variables of OpenMP and of PyTorch's allocator, unless the user has set them.

    Processes that Snakemake or a script starts inherit them.
    """
    # OpenMP's threads spin at a barrier before they sleep. The default of 300,000 turns takes a core from every other
    # process (docs/performance.md).
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "300"
    # Batches differ in length. Without it, GPU memory that was reserved for one length cannot be used for others.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def torch_imports() -> Iterator[None]:
    """Set the environment for the imports of a script inside the context."""
    set_torch_environment()
    yield
