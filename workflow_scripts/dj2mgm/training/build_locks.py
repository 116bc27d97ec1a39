"""Freeing PyTorch's build folders of locks that a killed process left: every later run would wait on them for ever.

DeepSpeed's extensions are compiled and loaded through torch.utils.cpp_extension, whose lock is a file without a word
on whose it is. But its owner keeps it open, so on this machine a lock that no process has open is nobody's. Where
the folder is shared with other machines, only age tells.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from dj2mgm.messages import note

SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "fuse.")
LONGEST_BUILD_S = 1800


def build_root() -> Path:
    """Where torch.utils.cpp_extension builds."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions")


def stale_locks(root: Path | None = None) -> list[Path]:
    """Locks below `root` (default: `build_root()`) whose owner is gone."""
    locks = [lock for pattern in ("*/lock", "*/*/lock") for lock in (root or build_root()).glob(pattern)]
    if not locks:
        return []
    held = set(_open_files())
    return [lock for lock in locks if os.path.realpath(lock) not in held and _is_own(lock)]


def remove_stale_locks() -> None:
    for lock in stale_locks():
        lock.unlink(missing_ok=True)
        note(f"removed {lock}: a build that was killed had left it")


def _open_files() -> Iterator[str]:
    """What this user's processes have open."""
    for process in psutil.process_iter():
        try:
            yield from (os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir())
        except OSError:  # it has just ended, or it is somebody else's
            continue


def _is_own(lock: Path) -> bool:
    try:
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:  # released in the meantime
        return False
    return not _shared(lock) or age_s > LONGEST_BUILD_S


def _shared(path: Path) -> bool:
    """Whether other machines may use the file system too."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    types = (mounts[folder] for folder in Path(os.path.realpath(path)).parents if folder in mounts)
    return next(types, "").startswith(SHARED)
