"""The variables that a shell needs before `snakemake`, where the machine's own do not fit."""

import shlex
from pathlib import Path

from diagnostics.cuda_probe import CudaProbe
from diagnostics.gpu_checks import matching_toolkit
from files import write_text

PATH = Path("results/doctor/environment.sh")


def variables(cuda: CudaProbe, torch_cuda: str | None) -> dict[str, str]:
    """
    Args:
        torch_cuda: the version that torch was built with; None: a CPU build.
    """
    toolkit = matching_toolkit(cuda, torch_cuda) if torch_cuda else None
    # CUDA promises compatibility within one major version, but DeepSpeed knows only pairs of versions older than itself
    compatible = toolkit is not None and toolkit.version != torch_cuda
    return ({"CUDA_HOME": toolkit.home} if toolkit else {}) | {
        "DS_BUILD_OPS": "0",  # compile what is used, when it is used
        "DS_SKIP_CUDA_CHECK": str(int(compatible)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def write_environment(values: dict[str, str], path: Path = PATH) -> None:
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    write_text(path, f"# source {path}   # before `snakemake`; written by doctor.py --fix\n{''.join(lines)}")
