"""The limits that a container or a scheduler put this process under: control groups, version 1 and 2."""

import os
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # bytes; version 1 writes "no limit" as the largest number of pages


@dataclass(frozen=True)
class CgroupLimits:
    memory: int | None  # bytes; None: no limit
    cpus: float | None
    oom_kills: int | None  # processes that the memory limit has ended so far; None: not recorded


def read_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> CgroupLimits:
    """The narrowest limits between this process's groups and the root."""
    memory, cpus, kills = [], [], None
    groups = [line.split(":", 2) for line in _read(proc).splitlines()]
    for _, controllers, path in groups:
        for folder in _upwards(root if controllers == "" else root / controllers, path):
            memory += _numbers(_read(folder / "memory.max")) + _numbers(_read(folder / "memory.limit_in_bytes"))
            cpus += _cpus(folder)
            if kills is None:
                kills = _oom_kills(folder)
    memory = [limit for limit in memory if limit < UNLIMITED]
    return CgroupLimits(min(memory, default=None), min(cpus, default=None), kills)


def total_memory() -> int:
    """Bytes of the machine's memory, whatever the limits."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and those above it. Inside a container the path may be the host's: then only the mount."""
    folder = mount / group.lstrip("/")
    return [folder, *(above for above in folder.parents if above.is_relative_to(mount))]


def _cpus(folder: Path) -> list[float]:
    quota = _numbers(_read(folder / "cpu.max")) or [
        *_numbers(_read(folder / "cpu.cfs_quota_us")),
        *_numbers(_read(folder / "cpu.cfs_period_us")),
    ]
    return [quota[0] / quota[1]] if len(quota) == 2 and quota[0] > 0 else []


def _oom_kills(folder: Path) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        counts = dict(line.split() for line in _read(folder / name).splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return None


def _numbers(text: str) -> list[int]:
    """Whole numbers; "max" is none."""
    return [int(word) for word in text.split() if word.lstrip("-").isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
