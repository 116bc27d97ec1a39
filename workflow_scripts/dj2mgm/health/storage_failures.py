"""Failures of storage: full disks and full shared memory."""

import os
import shutil
from pathlib import Path

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature
from dj2mgm.monitoring.memory_csv import format_gib

FULL_BYTES = 2**30  # a disk with less free space is called full
SHARED_MEMORY = "/dev/shm"


def explain_full(evidence: Evidence) -> Explanation | None:
    """Explain a full disk by the space and the inodes that are free now; shared memory has another signature."""
    if SHARED_MEMORY in evidence.line or "</torch_" in evidence.line:
        return None
    path = evidence.match["path"]
    folder = Path(path).parent if path and Path(path).parent.is_dir() else evidence.log.path.resolve().parent
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    message = f"a file could not be written{f' ({path})' if path else ''}, because there was no space for it"
    if system.f_files and not system.f_favail:
        now = f"The file system of {folder} has no inodes left, so it can hold no more files"
    elif free < FULL_BYTES:
        now = f"The file system of {folder} has {format_gib(free)} free"
    else:
        now = (
            f"The file system of {folder} has {format_gib(free)} free now. So it was full for some time only, or a "
            "quota (`quota -s`), a limit of file sizes (`ulimit -f`) or another file system was"
        )
    return Explanation(
        f"{message}. {now}",
        "free space (`df -h`, `df -i`; `du -sh results/* ~/.cache/* /tmp`), then run the same command again; a stage "
        "continues from its last complete checkpoint",
    )


def explain_shared_memory(evidence: Evidence) -> Explanation:
    folder = Path(SHARED_MEMORY)
    size = ""
    if folder.is_dir():
        usage = shutil.disk_usage(folder)
        size = f" ({format_gib(usage.total)}, of which {format_gib(usage.free)} are free now)"
    return Explanation(
        f"{SHARED_MEMORY}{size}, through which data loaders and NCCL pass data between processes, was full",
        "enlarge it for the container (`docker run --shm-size=8g` or `--ipc=host`), delete files that killed processes "
        f"left in {SHARED_MEMORY}, or set loader_workers: 0",
    )


STORAGE_SIGNATURES = (
    Signature(
        "Shared memory is full",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error"
        r"|unable to (?:write to|allocate shared memory\(shm\) for|mmap \d+ bytes from) file </torch_\w+>"
        r"|</torch_\w+>.*No space left on device"
        r"|/dev/shm/.*No space left on device|No space left on device.*/dev/shm/",
        explain_shared_memory,
    ),
    Signature(
        "The disk is full",
        r"(?:No space left on device|\[Errno 28\][^':\n]*)(?:: '(?P<path>[^'\n]+)')?|Disk quota exceeded"
        r"|OperationalError: database or disk is full|PytorchStreamWriter failed writing file"
        r"|inline_container\.cc:\d+\] \. unexpected pos",
        explain_full,
    ),
)
