"""Memory as stages write it: memory.csv, and sizes as people write them. Needs only the standard library."""

import csv
import math
from itertools import groupby
from pathlib import Path

from dj2mgm import messages
from dj2mgm.errors import InputError
from dj2mgm.files import readable, replace_file

# memory.csv: one row for each reading of a training stage's memory.
#
# Columns: `attempt`, counted from 1 where a run was resumed; `time`, UTC; `seconds` of the attempt; `phase`, one of
# loading, training and saving; then GiB: `job_gib`, of the stage's processes on this node;
# `host_gib`, of the whole machine; `cgroup_gib`, where a limit is set; `gpu<i>_gib` for each GPU.

LEADING = ("attempt", "time", "seconds", "phase")
LONGEST_ROW = 4096  # bytes


def start_file(file: Path, columns: list[str], resumed: bool) -> int:
    """Make the file ready for rows of a new attempt; return the attempt's number, from 1.

    A row that a kill cut off is dropped. With other GPUs than before, the file gets the columns of both. A damaged file
    is replaced: a record of memory must not end a training.
    """
    rows = _earlier_rows(file) if resumed and file.exists() else []
    known = list(dict.fromkeys([*(name for row in rows[:1] for name in row), *columns]))
    with replace_file(file) as new:
        writer = csv.DictWriter(new, known, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return int(rows[-1]["attempt"]) + 1 if rows else 1


def _earlier_rows(file: Path) -> list[dict[str, str]]:
    try:
        return read_rows(file)
    except InputError as error:
        messages.warn(f"{str(error).partition(':')[0]}; memory is recorded from here on")
        return []


def read_columns(file: Path) -> list[str]:
    with open(file, encoding="utf-8") as lines:
        return next(csv.reader(lines))


def last_row(file: Path) -> dict[str, str] | None:
    """The newest complete row, without reading all that come before it."""
    with open(file, "rb") as lines:
        columns = lines.readline()
        lines.seek(max(lines.tell(), file.stat().st_size - LONGEST_ROW))
        complete = lines.read().split(b"\n")[:-1]
    return next(csv.DictReader([columns.decode(), complete[-1].decode()])) if complete else None


def joined_seconds(rows: list[dict[str, str]]) -> list[float]:
    """Each attempt's seconds after those of the attempts before it."""
    joined: list[float] = []
    for _, attempt in groupby(rows, key=lambda row: row["attempt"]):
        before = joined[-1] if joined else 0.0
        joined += [before + float(row["seconds"]) for row in attempt]
    return joined


def read_rows(file: Path) -> list[dict[str, str]]:
    """The complete rows of a memory.csv, one at least, as text by column.

    Raises:
        InputError: it is something else.
    """
    with readable(file, csv.Error):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        if missing := {*LEADING, "job_gib"}.difference(reader.fieldnames or ()):
            raise ValueError(f"it lacks the column {min(missing)!r}")
        rows = list(reader)
        if not rows:
            raise ValueError("it has no complete row")
        for row in rows:
            _check_row(row)
        return rows


def _check_row(row: dict[str, str]) -> None:
    if None in row or None in row.values():
        raise ValueError("a row has other columns than the first line names")
    int(row["attempt"])
    numbers = [value for name, value in row.items() if name == "seconds" or (name.endswith("_gib") and value)]
    if not all(math.isfinite(float(value)) for value in numbers):
        raise ValueError("it holds a number that is not finite")


UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of "500.00 MiB", as PyTorch prints sizes."""
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
