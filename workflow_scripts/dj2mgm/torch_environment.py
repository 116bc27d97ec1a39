"""Environment variables that PyTorch and libraries for training read on import. Entry points set them first."""

import getpass
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

from dj2mgm.errors import InputError

COMPILED_CODE = Path(".snakemake/compiled")  # cache of torch.compile, in the folder in which Snakemake runs
# Variables with which launchers and job schedulers configure libraries. Trainer and accelerate would take precision,
# sharding or devices from them if the settings of a stage state nothing.
LIBRARY_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "SM_", "DS_DC_", "DS_SDMA_")
LIBRARY_VARIABLES = {
    *("DS_ACCELERATOR", "DS_PIN_MEMORY_BACKEND", "USE_TORCH_XLA", "PJRT_DEVICE", "TPU_NAME", "PT_HPU_LAZY_MODE"),
    # arithmetic of matrix products
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TRANSFORMERS_SDPA_FORCE_GQA"),
}
HARMLESS = {"ACCELERATE_LOG_LEVEL"}
COMPILED_CODE_BYTES = 2 * 2**30  # MGM-2B's fine-tuning takes 32 MB


def set_torch_environment() -> None:
    """Set variables of OpenMP and PyTorch's allocator unless the user has, and remove those of other launchers.

    Processes that Snakemake or a script starts inherit them.
    """
    for name in os.environ.keys() - HARMLESS:
        if name.startswith(LIBRARY_PREFIXES) or name in LIBRARY_VARIABLES:
            del os.environ[name]
    os.environ["USE_HUB_KERNELS"] = "NO"  # transformers would download code
    os.environ["TORCH_EXTENSIONS_DIR"] = str(locate_extensions())
    # OpenMP's threads spin at a barrier before they sleep. The default of 300,000 turns takes a core from every other
    # process (docs/performance.md).
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "300"
    # Batches differ in length. Without it, GPU memory that was reserved for one length cannot be used for others.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # PyTorch and Snakemake need a name of the user, and fail for a number without one, as in `docker run --user 10043`.
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def is_first_here() -> bool:
    """Return whether this is the first process of its training on this node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def locate_extensions() -> Path:
    """Return the folder of C++ extensions that are compiled for this environment and processor.

    In one folder, environments that take turns would compile them again each time, because PyTorch compares the
    commands of a build, which contain paths.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions"))
    if re.fullmatch(r"environment-[0-9a-f]{12}", root.name):  # set by the process that started this one
        root = root.parent
    key = sha256(f"{sys.prefix}\n{_read_processor_features()}".encode()).hexdigest()[:12]
    return root / f"environment-{key}"


@cache
def _read_processor_features() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


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
