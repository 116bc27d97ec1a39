"""Orphaned processes on a GPU: the user's own, whose parent has ended."""

import psutil

from dj2mgm.health.driver_probe import GpuProcess

GRACE_S = 10


def select_orphans(processes: tuple[GpuProcess, ...]) -> list[GpuProcess]:
    return [process for process in processes if process.mine and process.orphan]


def end_orphans(processes: tuple[GpuProcess, ...]) -> list[int]:
    """Terminate each orphan, kill it after GRACE_S seconds, and return the process ids."""
    ended = []
    for pid in {orphan.pid for orphan in select_orphans(processes)}:
        try:
            process = psutil.Process(pid)
            process.terminate()
            ended.append(process)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(ended, timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return sorted(process.pid for process in ended)
