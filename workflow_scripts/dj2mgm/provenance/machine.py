"""Describes this machine (processor, memory, GPUs) and the commit of this clone."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pynvml

from dj2mgm.code import SCRIPTS

ROOT = SCRIPTS.parent  # root of the clone


def describe_machine() -> dict:
    """Return the machine's properties by name; memory in GiB."""
    return {
        "system": platform.platform(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def find_commit() -> str:
    """Return the commit of this clone, with `-dirty` if files differ from it; empty if it is not a Git clone."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    # Git's configuration of a folder can start programs
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _gpus() -> list[str]:
    """Return the names of NVIDIA GPUs."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return names
