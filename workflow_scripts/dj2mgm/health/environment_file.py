"""Environment variables that a shell needs before `snakemake` if this machine's own do not fit."""

import shlex
from pathlib import Path

from dj2mgm.health.cuda_probe import CudaProbe
from dj2mgm.health.gpu_checks import find_matching_toolkit
from dj2mgm.storage.files import write_text

ENVIRONMENT_FILE = Path("results/doctor/environment.sh")


def build_environment_variables(cuda: CudaProbe, torch_cuda: str | None) -> dict[str, str]:
    """Return the environment variables that make DeepSpeed compile for this torch.

    `torch_cuda` is the CUDA version that torch was built with; None for a CPU build.
    """
    toolkit = find_matching_toolkit(cuda, torch_cuda) if torch_cuda else None
    # CUDA is compatible within a major version, but DeepSpeed knows only the pairs of versions older than itself
    compatible = toolkit is not None and toolkit.version != torch_cuda
    return ({"CUDA_HOME": toolkit.home} if toolkit else {}) | {
        "DS_BUILD_OPS": "0",  # compile each extension at its first use
        "DS_SKIP_CUDA_CHECK": str(int(compatible)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def write_environment(values: dict[str, str], path: Path = ENVIRONMENT_FILE) -> None:
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    write_text(path, f"# source {path}   # before `snakemake`; written by doctor.py --fix\n{''.join(lines)}")
