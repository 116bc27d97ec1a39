"""A table of paths and captions: comma-separated values (`.csv`), or separated by tabs (`.tsv`)."""

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dj2mgm.data.formats import conversation
from dj2mgm.data.rows import open_input
from dj2mgm.data.sources.columns import find_column
from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError

csv.field_size_limit(sys.maxsize)  # a cell may be as long as a jsonl's text
LOOK_FOR = "look for a quote that is not closed or not doubled, and for an unquoted comma"


def read(source: Source) -> Iterator[dict]:
    for file in source.files:
        with open_input(file, "rb") as raw:
            tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix.lower() == ".tsv" else {}
            rows = csv.reader(_lines(raw, file), strict=True, **tabs)
            there, _ = next(_filled(rows, file), ([], 0))
            if not there:
                raise InputError(f"{file} is empty; its first line names the columns")
            image, text = (_place(file, there, kind, source) for kind in ("image", "text"))
            question = _place(file, there, "question", source, needed=False)
            for number, (row, line) in enumerate(_filled(rows, file), start=2):
                if len(row) != len(there):
                    raise InputError(
                        f"{file}, line {line}: it has {len(row)} values, and the first line {len(there)} names; "
                        f"{LOOK_FOR}, or delete the line"
                    )
                asked = "" if question is None else row[question]
                yield conversation(f"{file.stem}-{number:09d}", row[image], asked, row[text])


def _lines(raw: IO[bytes], file: Path) -> Iterator[str]:
    """As csv wants them, which looks at their ends itself."""
    text = io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="")
    for number, line in enumerate(text, start=1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF
            raise InputError(f"{file}, line {number}: not UTF-8 (byte 0x{byte:02x}); save the table as UTF-8") from None
        yield line


def _filled(rows, file: Path) -> Iterator[tuple[list[str], int]]:
    """Rows that are not blank, each with the line in which it begins.

    Args:
        rows: a csv.reader.
    """
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise InputError(f"{file}, line {line}: {error}; {LOOK_FOR} in the row that begins there") from None
        if row is None:
            return
        if row:
            yield row, line


def _place(file: Path, there: list[str], kind: str, source: Source, needed: bool = True) -> int | None:
    name = find_column(file, there, kind, source, needed)
    if there.count(name) > 1:
        raise InputError(f"{file}: several columns are called {name!r}; rename all but one")
    return None if name is None else there.index(name)
