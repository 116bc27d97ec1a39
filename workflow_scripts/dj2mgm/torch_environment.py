"""Environment variables that PyTorch reads when it is imported. Entry points set them first."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dj2mgm.errors import InputError

COMPILED_CODE = Path(".snakemake/compiled")  # cache of torch.compile, in the folder in which Snakemake runs
COMPILED_CODE_BYTES = 2 * 2**30  # MGM-2B's fine-tuning takes 32 MB


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


def share_compiled_code() -> None:
    """Let all stages of this folder share compiled code, unless the user has set another folder for it.

    PyTorch's default is a folder in /tmp: each node has its own, and a restart deletes it.

    Raises:
        InputError: the folder cannot be made, or is a file.
    """
    folder = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED_CODE.absolute())))
    if folder == COMPILED_CODE.absolute():
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{COMPILED_CODE} is not a folder; delete it, so that compiled code can be kept there")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the environment variable TORCHINDUCTOR_CACHE_DIR: {folder} cannot be made ({error.strerror}); unset it, "
            "or name a writable folder"
        ) from None


def limit_compiled_code() -> None:
    """Delete the folder's compiled code if it is larger than COMPILED_CODE_BYTES; no stage may be running.

    A link to another folder has no limit, because it may lead to files of others.
    """
    if COMPILED_CODE.is_symlink():
        return
    sizes = (file.lstat().st_size for file in COMPILED_CODE.rglob("*"))
    if sum(sizes) > COMPILED_CODE_BYTES:
        shutil.rmtree(COMPILED_CODE, ignore_errors=True)  # what cannot be deleted stays, and is used


@contextmanager
def torch_imports() -> Iterator[None]:
    """Set the environment for the imports of a script inside the context."""
    set_torch_environment()
    yield
