"""Probe of the CUDA toolkits on this machine: the one that torch and DeepSpeed compile with, and others."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOOLKIT_FOLDERS = ("/usr/local", "/opt")
SYSTEM_CUDA = "/usr/local/cuda"


@dataclass(frozen=True)
class Toolkit:
    """CUDA toolkit in a folder."""

    home: str
    version: str  # of nvcc, as "12.4"


@dataclass(frozen=True)
class CudaProbe:
    """CUDA toolkits that were found."""

    variable: str | None  # value of CUDA_HOME or CUDA_PATH
    used: Toolkit | None  # None: torch would find no nvcc
    others: tuple[Toolkit, ...]


def probe_cuda() -> CudaProbe:
    variable = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    on_path = str(Path(nvcc).parents[1]) if nvcc else SYSTEM_CUDA
    used = find_toolkit(variable or on_path)  # the search order of torch.utils.cpp_extension
    homes = {on_path, SYSTEM_CUDA, sys.prefix, os.environ.get("CONDA_PREFIX", sys.prefix)}
    homes |= {str(path) for folder in TOOLKIT_FOLDERS for path in Path(folder).glob("cuda*")}
    others = {toolkit.version: toolkit for home in sorted(homes) if (toolkit := find_toolkit(home)) and toolkit != used}
    return CudaProbe(variable, used, tuple(others.values()))


def find_toolkit(home: str) -> Toolkit | None:
    """Return the toolkit in `home`; None without an nvcc that runs."""
    try:
        command = [Path(home) / "bin" / "nvcc", "--version"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", printed)
    return Toolkit(home, release[1]) if release else None
