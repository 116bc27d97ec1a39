"""What a container's or scheduler's control group holds in memory, and its limit: versions 1 and 2."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # bytes; version 1 writes "no limit" as the largest number of pages
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


def read_cgroup_memory(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> CgroupMemory | None:
    """Of the groups above this process the one with the least room left; None if no group has a limit."""
    found = [memory for folder in _groups(proc, root) if (memory := _read_group(folder))]
    return min(found, key=lambda memory: memory.limit - memory.used, default=None)


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """Folders of the process's groups and of those above them. Inside a container the path may be the host's and not
    exist; the mount itself is then the container's group."""
    for line in _read(proc).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = root / controllers
            folder = mount / path.lstrip("/")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount))


def _read_group(folder: Path) -> CgroupMemory | None:
    for limit_file, usage_file, droppable in FILES:
        limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < UNLIMITED:
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            return CgroupMemory(max(0, int(usage) - int(stat.get(droppable, 0))), int(limit))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
