"""Files of memory: memory.csv of a training stage, control groups of this process, and sizes. Standard library only."""

import csv
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from dj2mgm.cli import messages
from dj2mgm.errors import InputError
from dj2mgm.storage.files import readable, replace_file

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


# memory.csv has one row for each reading of a training stage's memory.
#
# Columns: `attempt`, which starts at 1 and rises by one with each resume; `time`, UTC; `seconds` of the attempt;
# `phase`, one of loading, training and saving. Sizes are in GiB: `job_gib`, the stage's processes on this node;
# `host_gib`, the whole machine; `cgroup_gib`, the control group, if a limit is set; `gpu<i>_gib`, each GPU.

LEADING_COLUMNS = ("attempt", "time", "seconds", "phase")
MAX_ROW_BYTES = 4096


def start_file(file: Path, columns: list[str], resumed: bool) -> int:
    """Prepare the file for rows of a new attempt; return the attempt's number, from 1.

    A row that was cut off by a kill is dropped. If the GPUs differ from the GPUs of earlier attempts, the file
    gets the columns of both. A damaged file is replaced, because a record of memory must not stop a training.
    """
    rows = _read_earlier_rows(file) if resumed and file.exists() else []
    all_columns = list(dict.fromkeys([*(name for row in rows[:1] for name in row), *columns]))
    with replace_file(file) as new:
        writer = csv.DictWriter(new, all_columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return int(rows[-1]["attempt"]) + 1 if rows else 1


def _read_earlier_rows(file: Path) -> list[dict[str, str]]:
    try:
        return read_memory_rows(file)
    except InputError as error:
        messages.warn(f"{str(error).partition(':')[0]}; memory is recorded from here on")
        return []


def read_columns(file: Path) -> list[str]:
    with open(file, encoding="utf-8") as lines:
        return next(csv.reader(lines))


def read_last_row(file: Path) -> dict[str, str] | None:
    """Return the newest complete row, without reading the rows before it."""
    with open(file, "rb") as lines:
        columns = lines.readline()
        lines.seek(max(lines.tell(), file.stat().st_size - MAX_ROW_BYTES))
        complete = lines.read().split(b"\n")[:-1]
    return next(csv.DictReader([columns.decode(), complete[-1].decode()])) if complete else None


def join_seconds(rows: list[dict[str, str]]) -> list[float]:
    """Return the seconds of each row since the start of the first attempt, without pauses between attempts."""
    seconds: list[float] = []
    for _, attempt in groupby(rows, key=lambda row: row["attempt"]):
        offset = seconds[-1] if seconds else 0.0
        seconds += [offset + float(row["seconds"]) for row in attempt]
    return seconds


def read_memory_rows(file: Path) -> list[dict[str, str]]:
    """Return the complete rows of a memory.csv, at least one, as strings by column."""
    with readable(file, csv.Error):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        if missing := {*LEADING_COLUMNS, "job_gib"}.difference(reader.fieldnames or ()):
            raise ValueError(f"the column {min(missing)!r} is missing")
        rows = list(reader)
        if not rows:
            raise ValueError("there is no complete row")
        for row in rows:
            _check_row(row)
        return rows


def _check_row(row: dict[str, str]) -> None:
    if None in row or None in row.values():
        raise ValueError("the columns of a row differ from those of the first line")
    int(row["attempt"])
    numbers = [value for name, value in row.items() if name == "seconds" or (name.endswith("_gib") and value)]
    if not all(math.isfinite(float(value)) for value in numbers):
        raise ValueError("a number is not finite")


GIB = 2**30
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


def parse_torch_size(text: str) -> int:
    """Return the bytes of a size as PyTorch prints it, such as "500.00 MiB"."""
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


def format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
