"""Functions that read and extend memory.csv, and format and parse sizes. They need the standard library only."""

import csv
import math
from itertools import groupby
from pathlib import Path

from dj2mgm.cli import messages
from dj2mgm.errors import InputError
from dj2mgm.storage.files import readable, replace_file

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
