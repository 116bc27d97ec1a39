"""Processes that were left behind on a GPU: the user's own, whose parent has ended."""

import psutil

from diagnostics.gpu_probe import GpuProcess

GRACE_S = 10


def strays(processes: tuple[GpuProcess, ...]) -> list[GpuProcess]:
    return [process for process in processes if process.mine and process.orphan]


def end_strays(processes: tuple[GpuProcess, ...]) -> list[int]:
    """Ask each to end, and make those end that have not after GRACE_S seconds; return their process ids."""
    found = []
    for pid in {stray.pid for stray in strays(processes)}:
        try:
            process = psutil.Process(pid)
            process.terminate()
            found.append(process)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(found, timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return sorted(process.pid for process in found)
