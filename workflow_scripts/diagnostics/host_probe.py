"""Memory, disk and limits of this machine and of this process in it."""

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from diagnostics.cgroups import CgroupLimits, read_limits

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class HostProbe:
    """Sizes in bytes; a limit that is None does not exist."""

    memory: int
    available: int
    swap: int
    cores: int  # that this process may run on
    cgroup: CgroupLimits
    shared: int | None  # free in /dev/shm; None: there is none
    disk: int  # free where results are written
    open_files: int | None
    processes: int | None
    address_space: int | None


def probe_host(results: Path) -> HostProbe:
    memory = psutil.virtual_memory()
    folder = next(path for path in (results.resolve(), *results.resolve().parents) if path.is_dir())
    return HostProbe(
        memory=memory.total,
        available=memory.available,
        swap=psutil.swap_memory().total,
        cores=len(os.sched_getaffinity(0)),
        cgroup=read_limits(),
        shared=shutil.disk_usage(SHARED).free if SHARED.is_dir() else None,
        disk=shutil.disk_usage(folder).free,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        processes=_soft_limit(resource.RLIMIT_NPROC),
        address_space=_soft_limit(resource.RLIMIT_AS),
    )


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
