"""What a container's or scheduler's control group holds in memory, and its limit: versions 1 and 2."""

from dataclasses import dataclass
from pathlib import Path

from diagnostics.cgroups import PROC, ROOT, UNLIMITED, group_folders, read_text

# (limit, usage, key of memory.stat whose pages the kernel drops before it kills anyone)
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class CgroupMemory:
    """Bytes, without cached file pages that the kernel gives back."""

    used: int
    limit: int


def read_cgroup_memory(proc: Path = PROC, root: Path = ROOT) -> CgroupMemory | None:
    """Of the groups above this process the one with the least room left; None if no group has a limit."""
    found = [memory for folder in group_folders("memory", proc, root) if (memory := _read_group(folder))]
    return min(found, key=lambda memory: memory.limit - memory.used, default=None)


def _read_group(folder: Path) -> CgroupMemory | None:
    for limit_file, usage_file, droppable in FILES:
        limit, usage = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < UNLIMITED:
            stat = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            return CgroupMemory(max(0, int(usage) - int(stat.get(droppable, 0))), int(limit))
    return None
