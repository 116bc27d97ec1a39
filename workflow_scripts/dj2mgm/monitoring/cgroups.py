"""Limits and memory use of the control groups (versions 1 and 2) that a container or scheduler set for this process."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # bytes; version 1 writes "no limit" as the largest number of pages


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of this process; None stands for no limit."""

    memory: int | None  # bytes
    cpus: float | None
    oom_kills: int | None  # processes that were killed at the memory limit so far; None: not recorded


def read_cgroup_limits(proc: Path = PROC, root: Path = ROOT) -> CgroupLimits:
    """Return the narrowest limits between this process's groups and the root."""
    memory_folders, cpu_folders = (
        list(iterate_group_folders(controller, proc, root)) for controller in ("memory", "cpu")
    )
    memory_limits = [size for folder in memory_folders for size in _read_memory_limits(folder)]
    cpu_limits = [share for folder in cpu_folders for share in _read_cpu_limits(folder)]
    kills = [count for folder in memory_folders for count in _read_oom_kills(folder)]
    return CgroupLimits(min(memory_limits, default=None), min(cpu_limits, default=None), next(iter(kills), None))


def iterate_group_folders(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's groups, and of their parents, whose limits may apply to `controller`.

    Inside a container, the path may be a path of the host that does not exist here. Then the mount itself is the
    container's group.
    """
    for line in read_or_empty(proc).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):  # "" is version 2, with all controllers
            mount = root / controllers
            folder = mount / path.lstrip("/")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount))


def read_or_empty(path: Path) -> str:
    """Return the content of a file, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def read_total_memory() -> int:
    """Return the bytes of the machine's memory, without regard to limits."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_memory_limits(folder: Path) -> list[int]:
    limits = [_parse_integers(read_or_empty(folder / name)) for name in ("memory.max", "memory.limit_in_bytes")]
    return [limit for numbers in limits for limit in numbers if limit < NO_LIMIT]


def _read_cpu_limits(folder: Path) -> list[float]:
    quota = _parse_integers(read_or_empty(folder / "cpu.max")) or [
        *_parse_integers(read_or_empty(folder / "cpu.cfs_quota_us")),
        *_parse_integers(read_or_empty(folder / "cpu.cfs_period_us")),
    ]
    return [quota[0] / quota[1]] if len(quota) == 2 and quota[0] > 0 else []


def _read_oom_kills(folder: Path) -> list[int]:
    texts = [read_or_empty(folder / name) for name in ("memory.events", "memory.oom_control")]
    pairs = [line.split() for text in texts for line in text.splitlines()]
    return [int(count) for name, count in pairs if name == "oom_kill"]


def _parse_integers(text: str) -> list[int]:
    """Return the whole numbers in a text; "max" does not count."""
    return [int(word) for word in text.split() if word.lstrip("-").isdigit()]


# (limit, usage, key in memory.stat of pages that the kernel drops before it kills a process), for versions 2 and 1
LIMIT_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class CgroupMemory:
    """Memory of a control group in bytes, without cached file pages that the kernel frees on demand."""

    used: int
    limit: int


def read_cgroup_memory(proc: Path = PROC, root: Path = ROOT) -> CgroupMemory | None:
    """Return the memory of the group with the least room left; None if no group has a limit."""
    groups = [memory for folder in iterate_group_folders("memory", proc, root) if (memory := _read_group(folder))]
    return min(groups, key=lambda memory: memory.limit - memory.used, default=None)


def _read_group(folder: Path) -> CgroupMemory | None:
    for limit_file, usage_file, droppable in LIMIT_FILES:
        limit, usage = read_or_empty(folder / limit_file).strip(), read_or_empty(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < NO_LIMIT:
            stat = dict(line.split() for line in read_or_empty(folder / "memory.stat").splitlines())
            return CgroupMemory(max(0, int(usage) - int(stat.get(droppable, 0))), int(limit))
    return None
