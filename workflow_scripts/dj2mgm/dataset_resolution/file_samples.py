"""Small samples of untrusted files: the first rows of JSON and tables, the first members of a tar, columns of others.

Snakemake reads them whenever it starts, so at most one MiB of rows is read.
"""

import codecs
import csv
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from dj2mgm.errors import InputError
from dj2mgm.storage.files import MIB, check_no_null, check_plain, open_plain
from dj2mgm.storage.image_files import read_members
from dj2mgm.storage.streaming import (
    MAX_ROW,
    make_row_size_error,
    open_input,
    parse_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
MAX_ROWS = 32
MAX_MEMBERS = 64
MAX_DESCRIBED = 1 << 16  # bytes of a JSON member
# accepts NaN, repeated keys and half surrogate pairs, which the reader of all rows refuses
LENIENT = json.JSONDecoder()
SPACE = re.compile(r"\s*")
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\r?')
LOOK_FOR = "look for a quote that is not closed or not doubled, or for an unquoted comma"

PLAIN_QUOTES = (
    ". A cell that begins with a quote is read as quoted, as pandas does; if your quotes are plain characters, double "
    "them and put the cell in quotes"
)
STREAM = "an arrow stream, as `save_to_disk` of datasets writes"
SAVED_STATE = "state.json"  # lists the arrow files of a saved dataset; others next to it are a cache
SAVED_RECORDS = (SAVED_STATE, "dataset_info.json", "dataset_dict.json")  # files of save_to_disk without rows


@dataclass(frozen=True)
class FileSample:
    """The beginning of a file.

    Attributes:
        names: keys of the rows, names of the columns, or suffixes of the members.
        rows: rows by name; empty for parquet. For a tar, the content of its first `.json`.
        kinds: kinds of parquet's columns: `text`, `image` (bytes, or a struct with them), `turns` (of a conversation),
            lists of these, or `other`.
        is_list: whether the rows are one JSON list instead of a line each.
    """

    names: tuple[str, ...]
    rows: tuple[dict[str, Any], ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    is_list: bool = False


def read_sample(path: Path, folder: Path) -> FileSample:
    """Return the beginning of a file in `folder`, read by its suffix.

    Raises:
        InputError: the file is not a regular file in the folder, or its content does not fit its ending.
    """
    check_plain(path, folder, None)
    return READERS[path.suffix.lower()](path)


def _read_rows(path: Path) -> FileSample:
    """Sample the first rows of a JSON list or a jsonl file; only a first row that is no JSON object raises InputError.

    Other faults are left to the reader of all rows, because the file may be another program's, next to the data.
    """
    content, is_whole = _read_beginning(path)
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=is_whole)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}, line {line}: not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8"
        ) from None
    check_no_null(text, path)
    is_list = path.suffix.lower() == ".json"
    if is_list and text.startswith("{", _skip_space(text, 0)):  # probably settings or statistics: no format matches
        return FileSample((), is_list=True)
    rows = _read_first((_decode_items if is_list else _decode_lines)(text, is_whole, path), MAX_ROWS)
    if not rows:
        raise InputError(f"{path} has no rows; add some, or delete it")
    return FileSample(tuple(dict.fromkeys(key for row in rows for key in row)), tuple(rows), is_list=is_list)


def _read_beginning(path: Path) -> tuple[bytes, bool]:
    """Return the first MiB of a file, and whether this is the whole file."""
    with open_input(path, "rb") as file:
        content = file.read(MIB + 1)
    return content[:MIB], len(content) <= MIB


def _decode_lines(text: str, is_whole: bool, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the beginning of a jsonl file, except for a line that it cuts."""
    lines = text.split("\n")
    if not is_whole and len(lines) == 1:
        raise _make_size_error(f"{path}, line 1")
    for number, line in enumerate(lines if is_whole else lines[:-1], start=1):
        if line.strip():
            location = f"{path}, line {number}"
            try:
                row = LENIENT.decode(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{location}: not one JSON object ({error}); fix or delete the line") from None
            yield _check_is_object(row, location)


def _decode_items(text: str, is_whole: bool, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the beginning of a JSON list."""
    at = _skip_space(text, 0)
    if not text.startswith("[", at):
        found = "something else" if text[at:] else "an empty file"
        raise InputError(f"{path}: expected a JSON list, found {found}; check that this is the right file")
    for number in count(1):
        location = f"{path}, row {number}"
        at = _skip_space(text, at + 1)  # after the bracket or a comma
        if text.startswith("]", at):
            return
        try:
            row, at = LENIENT.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if not is_whole and not isinstance(error, RecursionError):
                raise _make_size_error(location) from None
            raise InputError(f"{location}: not valid JSON ({error}); fix the file") from None
        yield _check_is_object(row, location)
        at = _skip_space(text, at)
        if not text.startswith(",", at):
            return


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()


def _check_is_object(row: object, location: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{location}: expected a JSON object, found {type(row).__name__}")
    return row


def _make_size_error(location: str) -> InputError:
    return InputError(
        f"{location}: not read in the first {MIB} bytes (1 MiB) of the file, by which its format is recognized; fix or "
        "shorten it"
    )


def _read_first(rows: Iterator[T], most: int) -> list[T]:
    """Return the first rows; the reader of all rows reports a damaged one, unless it is the first."""
    first: list[T] = []
    try:
        for row in islice(rows, most):
            first.append(row)
    except InputError:
        if not first:
            raise
    return first


def _read_table(path: Path) -> FileSample:
    """Sample the column names and the first rows of a table."""
    content, is_whole = _read_beginning(path)
    if not is_whole:
        content = content[: max(map(content.rfind, (b"\n", b"\r"))) + 1]
        if not content:
            raise _make_size_error(f"{path}, line 1")
    rows = [row for row, _ in _read_first(_parse_table(io.BytesIO(content), path), MAX_ROWS + 1)]
    if not rows:
        raise InputError(f"{path} is empty; its first line names the columns")
    names = tuple(rows[0])
    return FileSample(names, tuple(dict(zip(names, row, strict=False)) for row in rows[1:]))


def read_table_rows(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the rows of a table, the first of which has the names of its columns, and the line where each begins.

    Blank rows, and one that only states the separator, are left out.
    """
    with open_input(path, "rb") as raw:
        yield from _parse_table(raw, path)


def _parse_table(raw: IO[bytes], path: Path) -> Iterator[tuple[list[str], int]]:
    csv.field_size_limit(MAX_ROW)
    dialect = _find_dialect(path, raw.read(MIB).decode(errors="replace"))
    raw.seek(0)
    lines = _Lines(raw, path)
    rows = _skip_blank_rows(csv.reader(lines, strict=True, **dialect), lines)
    for row, line in islice(rows, 1):
        if not _is_separator_row(row):
            yield row, line
    yield from rows


class _Lines:
    """Lines of a table for csv.reader, which handles line ends itself.

    Attributes:
        row_size: characters since the start of the row; the caller resets it for each row.
    """

    def __init__(self, raw: IO[bytes], file: Path):
        self.text = io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="")
        self.file, self.number, self.row_size = file, 0, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        """Return the next line; raise InputError if it is not UTF-8 or makes its row longer than MAX_ROW characters."""
        line = self.text.readline(MAX_ROW + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.row_size += len(line)
        if self.row_size > MAX_ROW:
            raise make_row_size_error(f"{self.file}, line {self.number}")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF
            raise InputError(
                f"{self.file}, line {self.number}: not UTF-8 (byte 0x{byte:02x}); save the table as UTF-8"
            ) from None
        return check_no_null(line, f"{self.file}, line {self.number}")


def _skip_blank_rows(rows, lines: _Lines) -> Iterator[tuple[list[str], int]]:
    """Yield the rows of a csv.reader that are not blank, each with its first line number."""
    while True:
        line, lines.row_size = rows.line_num + 1, 0
        try:
            row = next(rows, None)
        except csv.Error as error:
            plain = PLAIN_QUOTES if lines.file.suffix.lower() == ".tsv" else ""
            raise InputError(
                f"{lines.file}, line {line}: {error}; {LOOK_FOR} in the row that begins at this line{plain}"
            ) from None
        if row is None:
            return
        if row:
            yield row, line


def _find_dialect(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments of `csv.reader` for a table that begins with this text.

    Spreadsheet programs write .csv with semicolons in countries with decimal commas. A cell that begins with a quote is
    quoted in .tsv, too, as pandas writes and reads it.
    """
    if path.suffix.lower() == ".tsv":
        return {"delimiter": "\t"}
    names = text.lstrip("\ufeff\r\n").partition("\n")[0]
    if line := SEPARATOR_LINE.match(names):
        return {"delimiter": line[1]}
    return {"delimiter": max(",;\t", key=names.count)}


def _is_separator_row(row: list[str]) -> bool:
    """Return whether the first row of a table only states its separator: `sep=;`, as Excel reads it."""
    return row[0] == "sep=" and not any(row[1:]) or (len(row) == 1 and SEPARATOR_LINE.fullmatch(row[0]) is not None)


def _read_tar(path: Path) -> FileSample:
    """Sample the suffixes of a tar's first members, and the first JSON object among them."""
    suffixes: dict[str, None] = {}
    metadata: dict[str, Any] = {}
    try:
        for member in islice(read_members(path), MAX_MEMBERS):
            name = member.name.rpartition("/")[2]
            suffix = f".{name.partition('.')[2]}".lower()
            if name.find(".") > 0:  # a member of a WebDataset sample
                suffixes[suffix] = None
            if suffix == ".json" and not metadata and member.size <= MAX_DESCRIBED:
                metadata = _parse_object(member.read())
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} is damaged or not a plain tar file ({error}); download it again, or decompress it"
        ) from None
    return FileSample(tuple(suffixes), (metadata,) if metadata else ())


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # the full reader reports this member
        return {}
    return value if isinstance(value, dict) else {}


def _read_schema(path: Path) -> FileSample:
    """Sample the columns of a parquet or arrow file; no row is read."""
    try:
        import pyarrow as pa  # here, because it takes 0.2 s and is needed for this format only
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(
            f"{path}: its columns cannot be read without pyarrow; install it (pip install pyarrow)"
        ) from None
    is_parquet = path.suffix.lower() == ".parquet"
    with open_input(path, "rb") as file:
        try:
            schema = pq.read_schema(file) if is_parquet else pa.ipc.open_stream(file).schema
        except (pa.ArrowException, OSError, ValueError) as error:
            reason, kind = str(error).partition("\n")[0], "a parquet file" if is_parquet else STREAM
            raise InputError(f"{path} is damaged or not {kind} ({reason}); download it again") from None
    return FileSample(tuple(schema.names), kinds={column.name: _find_kind(column.type) for column in schema})


def list_cached(files: Iterable[Path]) -> set[Path]:
    """Return the arrow files that belong to the cache of datasets, and not to a saved dataset.

    Raises:
        InputError: a saved dataset consists of selected rows of its files.
    """
    names: dict[Path, set[str] | None] = {}
    cached = set()
    for file in files:
        if file.suffix.lower() != ".arrow":
            continue
        folder = file.parent
        if folder not in names:
            names[folder] = _list_saved(folder)
        saved = names[folder]
        if file.name not in saved if saved is not None else file.name.startswith("cache-"):
            cached.add(file)
    return cached


def _list_saved(folder: Path) -> set[str] | None:
    """Return the names of the files of a saved dataset; None if the folder has no readable list of them."""
    path = folder / SAVED_STATE
    if not path.is_file():
        return None
    with open_plain(path, folder, MIB) as file:
        state = _parse_object(file.read())
    if state.get("_indices_data_files"):
        raise InputError(
            f"{path}: an old version of datasets saved a selection of rows; load the folder with it, and save "
            "`flatten_indices()`"
        )
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
    return {part["filename"] for part in files if isinstance(part, dict) and isinstance(part.get("filename"), str)}


def _find_kind(column_type: "pa.DataType") -> str:
    """Return the kind of a column, or of the items of a list."""
    from pyarrow import types

    is_list = types.is_list(column_type) or types.is_large_list(column_type)
    column_type = column_type.value_type if is_list or types.is_dictionary(column_type) else column_type
    if types.is_binary(column_type) or types.is_large_binary(column_type):
        return "image"
    if types.is_string(column_type) or types.is_large_string(column_type):
        return "text"
    if not types.is_struct(column_type):
        return "other"
    keys = {field.name for field in column_type}
    if "bytes" in keys:
        return "image"
    return "turns" if is_list and keys & {"role", "from", "user"} else "other"


READERS: dict[str, Callable[[Path], FileSample]] = {
    ".jsonl": _read_rows,
    ".json": _read_rows,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".tar": _read_tar,
    ".parquet": _read_schema,
    ".arrow": _read_schema,
}
