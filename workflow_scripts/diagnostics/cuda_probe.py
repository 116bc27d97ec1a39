"""CUDA toolkits on this machine: the one that torch and DeepSpeed compile with, and what else there is."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/usr/local", "/opt")
SYSTEM = "/usr/local/cuda"


@dataclass(frozen=True)
class Toolkit:
    home: str
    version: str  # of nvcc, as "12.4"


@dataclass(frozen=True)
class CudaProbe:
    variable: str | None  # CUDA_HOME, or CUDA_PATH, as it is set
    used: Toolkit | None  # None: nvcc is not where torch looks for it
    others: tuple[Toolkit, ...]


def probe_cuda() -> CudaProbe:
    variable = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    on_path = str(Path(nvcc).parents[1]) if nvcc else SYSTEM
    used = find_toolkit(variable or on_path)  # torch.utils.cpp_extension looks in this order
    homes = {on_path, SYSTEM, sys.prefix, os.environ.get("CONDA_PREFIX", sys.prefix)}
    homes |= {str(path) for place in PLACES for path in Path(place).glob("cuda*")}
    others = {toolkit.version: toolkit for home in sorted(homes) if (toolkit := find_toolkit(home)) and toolkit != used}
    return CudaProbe(variable, used, tuple(others.values()))


def find_toolkit(home: str) -> Toolkit | None:
    """None where there is no nvcc that runs."""
    try:
        command = [Path(home) / "bin" / "nvcc", "--version"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", printed)
    return Toolkit(home, release[1]) if release else None
