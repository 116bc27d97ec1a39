"""Removal of locks that killed processes left in PyTorch's build folders, on which other runs would wait forever.

DeepSpeed's extensions are compiled and loaded through torch.utils.cpp_extension, whose lock is an empty file. Its owner
keeps it open, so a lock that no process of this machine has open is stale. In a folder that is shared with other
machines, a lock is stale after MAX_BUILD_S.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import psutil

from dj2mgm.cli.messages import note
from dj2mgm.torch_environment import is_first_here, locate_extensions

# types of file systems
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "9p",
    "fuse.",
)
MAX_BUILD_S = 1800
CHECK_S = 5.0  # between two checks during a wait


def find_stale_locks() -> list[Path]:
    """Return the locks of extensions whose owner has ended."""
    locks = list(locate_extensions().glob("*/lock"))
    if not locks:
        return []
    open_files = set(_list_open_files())
    return [lock for lock in locks if os.path.realpath(lock) not in open_files and _may_be_stale(lock)]


def remove_stale_locks() -> None:
    """Remove stale locks, in the first process of this node: another one could remove the lock that it takes next."""
    if not is_first_here():
        return
    for lock in find_stale_locks():
        lock.unlink(missing_ok=True)
        note(f"removed {lock}, which a killed build had left")


@contextmanager
def guard_wait_for_locks() -> Iterator[None]:
    """Remove stale locks while extensions are loaded: the process that holds one may be killed meanwhile."""
    loaded = Event()

    def check() -> None:
        while not loaded.wait(CHECK_S):
            with suppress(PermissionError):  # another user's lock
                remove_stale_locks()

    checks = Thread(target=check, daemon=True)
    checks.start()
    try:
        yield
    finally:
        loaded.set()
        checks.join()


def _list_open_files() -> Iterator[str]:
    """Yield the paths of files that processes of this user have open."""
    for process in psutil.process_iter():
        try:
            links = list(Path(f"/proc/{process.pid}/fd").iterdir())
        except OSError:  # the process has just ended, or belongs to another user
            continue
        for link in links:
            with suppress(OSError):  # closed in the meantime, as that of the listing itself
                yield os.readlink(link)


def _may_be_stale(lock: Path) -> bool:
    try:
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:  # released in the meantime
        return False
    return not _is_shared(lock) or age_s > MAX_BUILD_S


def _is_shared(path: Path) -> bool:
    """Return whether other machines may use the file system too."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    types = (mounts[folder] for folder in Path(os.path.realpath(path)).parents if folder in mounts)
    return next(types, "").startswith(NETWORK_FILE_SYSTEMS)
