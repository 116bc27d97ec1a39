"""Probe of the host: memory, disk, limits and the loopback interface, of this machine and of this process."""

import os
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from dj2mgm.monitoring.cgroups import CgroupLimits, read_cgroup_limits

SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "127.0.0.1"
LOOPBACK_LIMIT_S = 5


@dataclass(frozen=True)
class HostProbe:
    """Memory, disk and limits, in bytes, and the loopback interface; a limit of None does not exist."""

    memory: int
    available: int
    swap: int
    cores: int  # available to this process
    cgroup: CgroupLimits
    shared: int | None  # free in /dev/shm; None: it does not exist
    disk: int  # free in the folder of results
    open_files: int | None
    processes: int | None
    address_space: int | None
    loopback_error: str | None  # why a connection on 127.0.0.1 failed


def probe_host(results: Path) -> HostProbe:
    """Measure memory, disk and limits in bytes; the disk is the one of the nearest existing folder above `results`."""
    memory = psutil.virtual_memory()
    folder = next(path for path in (results.resolve(), *results.resolve().parents) if path.is_dir())
    return HostProbe(
        memory=memory.total,
        available=memory.available,
        swap=psutil.swap_memory().total,
        cores=len(os.sched_getaffinity(0)),
        cgroup=read_cgroup_limits(),
        shared=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        disk=shutil.disk_usage(folder).free,
        open_files=_read_soft_limit(resource.RLIMIT_NOFILE),
        processes=_read_soft_limit(resource.RLIMIT_NPROC),
        address_space=_read_soft_limit(resource.RLIMIT_AS),
        loopback_error=connect_to_itself(),
    )


def connect_to_itself(address: str = LOOPBACK) -> str | None:
    """Open a connection from this process to itself at `address`, and return why it failed."""
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), LOOPBACK_LIMIT_S).close()
    except OSError as error:
        return str(error)
    return None


def _read_soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
