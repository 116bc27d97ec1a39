"""Failures of storage: full disks and full shared memory."""

import shutil
from pathlib import Path

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature
from dj2mgm.monitoring.memory_csv import format_gib


def explain_full(evidence: Evidence) -> Explanation:
    folder = evidence.log.path.resolve().parent
    free = format_gib(shutil.disk_usage(folder).free)
    path_note = f" ({evidence.match['path']})" if evidence.match["path"] else ""
    return Explanation(
        f"a file could not be written{path_note}, because the disk was full. The disk of this log now has {free} free",
        "free space (`df -h`; `du -sh results/* ~/.cache/* /tmp`), then run the same command again; a stage continues "
        "from its last complete checkpoint. A quota (`quota -s`) and a limit of file sizes (`ulimit -f`) produce the "
        "same message",
    )


def explain_shared_memory(evidence: Evidence) -> Explanation:
    folder = Path("/dev/shm")
    size = f" ({format_gib(shutil.disk_usage(folder).total)})" if folder.is_dir() else ""
    return Explanation(
        f"/dev/shm{size}, through which data loader processes pass batches, was full",
        "enlarge it for the container (`docker run --shm-size=8g` or `--ipc=host`), or set loader_workers: 0",
    )


STORAGE_SIGNATURES = (
    Signature(
        "Shared memory is full",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error"
        r"|unable to (?:write to|allocate shared memory\(shm\) for|mmap \d+ bytes from) file </torch_\w+>",
        explain_shared_memory,
    ),
    Signature(
        "The disk is full",
        r"No space left on device(?:: '(?P<path>[^']+)')?|Disk quota exceeded"
        r"|OperationalError: database or disk is full|PytorchStreamWriter failed writing file"
        r"|inline_container\.cc:\d+\] \. unexpected pos",
        explain_full,
    ),
)
