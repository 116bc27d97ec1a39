"""Small samples of untrusted files: the first rows of JSON and tables, the first members of a tar, columns of others.

Snakemake reads them whenever it starts, so each read is bounded.
"""

import codecs
import csv
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dj2mgm.errors import InputError
from dj2mgm.storage.image_files import read_members
from dj2mgm.storage.plain_files import MIB, check_no_null, check_plain, open_plain

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 32
MAX_MEMBERS = 64
MAX_DESCRIBED = 1 << 16  # bytes of a JSON member
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\r?')
DECODER = json.JSONDecoder()
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
    try:
        return READERS[path.suffix.lower()](path, folder)
    except RecursionError:
        raise InputError(f"{path}: its values are nested too deeply; write them flat") from None


def _read_lines(path: Path, folder: Path) -> FileSample:
    """Sample the first rows of a jsonl file; only a damaged first line raises InputError."""
    text, is_whole = _read_text(path, folder)
    lines = text.split("\n")
    if not is_whole and len(lines) == 1:
        raise InputError(f"{path}: its first line has more than {MIB} bytes, so its format is not recognized")
    rows: list[Any] = []
    for line in filter(str.strip, lines if is_whole else lines[:-1]):
        try:
            rows.append(DECODER.decode(line))
        except ValueError as error:
            if not rows:
                raise InputError(
                    f"{path}: its first line is not valid JSON ({_get_reason(error)}); correct it"
                ) from None
            break  # the reader of all rows reports the damaged line
        if len(rows) == MAX_ROWS:
            break
    return _sample_rows(rows, path)


def _read_list(path: Path, folder: Path) -> FileSample:
    """Sample the first rows of a JSON list, read up to MIB bytes; only a damaged first row raises InputError."""
    text, is_whole = _read_text(path, folder)
    start = _skip_space(text, 0)
    if text[start : start + 1] == "{":
        return FileSample(
            (), is_list=True
        )  # one object, not a list: probably settings or statistics, so no format matches
    if text[start : start + 1] != "[":
        raise InputError(f"{path} is not a JSON list of rows; correct it, or name it .jsonl if each line is an object")
    rows: list[Any] = []
    while len(rows) < MAX_ROWS:
        start = _skip_space(text, start + 1)  # after the bracket or a comma
        if text[start : start + 1] == "]":
            break
        try:
            row, start = DECODER.raw_decode(text, start)
        except ValueError as error:
            if not rows:
                reason = _get_reason(error) if is_whole else f"it has more than {MIB} bytes"
                raise InputError(f"{path}: its first row cannot be read ({reason}); correct it") from None
            break
        rows.append(row)
        start = _skip_space(text, start)
        if text[start : start + 1] != ",":
            break
    return replace(_sample_rows(rows, path), is_list=True)


def _skip_space(text: str, start: int) -> int:
    while text[start : start + 1].isspace():
        start += 1
    return start


def _sample_rows(rows: list[Any], path: Path) -> FileSample:
    if not rows:
        raise InputError(f"{path} has no rows; add some, or delete it")
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: its rows are not JSON objects; correct it")
    return FileSample(tuple(dict.fromkeys(key for row in rows for key in row)), tuple(rows))


def _read_table(path: Path, folder: Path) -> FileSample:
    """Sample the column names and the first rows of a table, read up to MIB bytes."""
    text, is_whole = _read_text(path, folder)
    lines = text if is_whole else text[: text.rfind("\n") + 1]
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(lines, newline=""), strict=True, **find_dialect(path, lines)):
            rows += [row] if row and (rows or not is_separator_row(row)) else []
            if len(rows) > MAX_ROWS:
                break
    except csv.Error as error:
        if not rows:
            raise InputError(f"{path}: its first line cannot be read ({error}); correct it") from None
    if not rows:
        raise InputError(f"{path} has no first line of at most {MIB} bytes that names its columns; add it")
    names = tuple(rows[0])
    return FileSample(names, tuple(dict(zip(names, row, strict=False)) for row in rows[1:]))


def find_dialect(path: Path, text: str) -> dict[str, Any]:
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


def is_separator_row(row: list[str]) -> bool:
    """Return whether the first row of a table only states its separator: `sep=;`, as Excel reads it."""
    return row[0] == "sep=" and not any(row[1:]) or (len(row) == 1 and SEPARATOR_LINE.fullmatch(row[0]) is not None)


def _read_text(path: Path, folder: Path) -> tuple[str, bool]:
    """Return the first MiB of a file as text, and whether this is the whole file."""
    with open_plain(path, folder, None) as file:
        content = file.read(MIB + 1)
    is_whole = len(content) <= MIB
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=is_whole)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    return check_no_null(text, path), is_whole


def _get_reason(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _read_tar(path: Path, folder: Path) -> FileSample:
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
        value = DECODER.decode(content.decode("utf-8-sig"))
    except ValueError:  # the full reader reports this member
        return {}
    return value if isinstance(value, dict) else {}


def _read_schema(path: Path, folder: Path) -> FileSample:
    """Sample the columns of a parquet or arrow file; no row is read."""
    try:
        import pyarrow as pa  # here, because it takes 0.2 s and is needed for this format only
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(
            f"{path}: its columns cannot be read without pyarrow; install it (pip install pyarrow)"
        ) from None
    is_parquet = path.suffix.lower() == ".parquet"
    with open_plain(path, folder, None) as file:
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


READERS: dict[str, Callable[[Path, Path], FileSample]] = {
    ".jsonl": _read_lines,
    ".json": _read_list,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".tar": _read_tar,
    ".parquet": _read_schema,
    ".arrow": _read_schema,
}
