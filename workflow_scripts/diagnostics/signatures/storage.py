"""Disks and shared memory that are full."""

import shutil
from pathlib import Path

from diagnostics.signature import Explanation, Found, Signature
from diagnostics.sizes import gib


def explain_full(found: Found) -> Explanation:
    folder = found.log.path.resolve().parent
    free = gib(shutil.disk_usage(folder).free)
    named = f" ({found.match['path']})" if found.match["path"] else ""
    return Explanation(
        f"a file could not be written{named}: the disk was full. Where this log lies, {free} are free now",
        "free space (`df -h`; `du -sh results/* ~/.cache/* /tmp`), then run the same command again: a stage goes "
        "on from its last complete checkpoint. A quota (`quota -s`) looks the same",
    )


def explain_shared_memory(found: Found) -> Explanation:
    there = Path("/dev/shm")
    size = f"; it has {gib(shutil.disk_usage(there).total)}" if there.is_dir() else ""
    return Explanation(
        f"/dev/shm, through which data loader processes hand over batches, was full{size}",
        "give the container more (`docker run --shm-size=8g` or `--ipc=host`), or set loader_workers: 0",
    )


SIGNATURES = (
    Signature(
        "Shared memory is full",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error"
        r"|unable to (?:write to|allocate shared memory\(shm\) for|mmap \d+ bytes from) file </torch_\w+>",
        explain_shared_memory,
    ),
    Signature(
        "The disk is full",
        r"No space left on device(?:: '(?P<path>[^']+)')?|Disk quota exceeded"
        r"|PytorchStreamWriter failed writing file|inline_container\.cc:\d+\] \. unexpected pos",
        explain_full,
    ),
)
