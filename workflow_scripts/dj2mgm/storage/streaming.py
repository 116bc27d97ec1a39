"""Readers of JSON and jsonl row by row, and tools for more rows than fit in memory."""

import codecs
import ctypes
import gc
import json
import os
import re
import signal
import sqlite3
import stat
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count
from multiprocessing import get_context
from pathlib import Path
from typing import IO, TypeVar

from dj2mgm.errors import InputError, quote_value
from dj2mgm.storage.files import check_no_null, readable

CACHE_KIB = 1024
T, R = TypeVar("T"), TypeVar("R")
ITEMS_AHEAD = 2  # items per process that are processed or waiting
_function: Callable | None = None  # a forked worker inherits its function here, because functions may not be picklable
MAX_ROW = 2**25  # bytes of a row; reading takes several times as many, and models read far shorter rows
MAX_JSON = 2**30  # bytes of a JSON file that is read as a whole
MAX_ROW_DEPTH = 100  # levels of nested lists and objects; pickling a row for another process is recursive
CHUNK_CHARACTERS = 1 << 16  # characters read at a time, or more for longer items
BEFORE_FIRST, BEFORE_NEXT = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*")
REST_OF_NUMBER = re.compile(r"[-+.eE\d]*")  # also matches the empty string
OBJECT_FOUND = "an object; the name of a file with one object per line must end in .jsonl"
SPACE, MAX_WORD_LENGTH = re.compile(r"\s*"), len("-Infinity")
EMPTY, END = re.compile(r"\s*\[\s*\]\s*\Z"), re.compile(r"\s*\]\s*\Z")


class DiskMap:
    """Mapping from strings to strings or integers on disk, which disappears with the process.

    SQLite keeps a database that is opened as "" in an unnamed temporary file (in SQLITE_TMPDIR or TMPDIR), and only its
    cache in memory.
    """

    def __init__(self):
        # a single cursor, because a connection keeps each new cursor for a while
        self._database = sqlite3.connect("", isolation_level=None).cursor()
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE map (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
        self._database.execute("BEGIN")  # never committed, because a commit writes out the cache

    def setdefault(self, key: str, value: str | int) -> str | int:
        """Return the value of `key`, and set it to `value` if it has none."""
        if self._database.execute("INSERT OR IGNORE INTO map VALUES (?, ?)", (key, value)).rowcount:
            return value
        return self.get(key)

    def fill(self, items: Iterable[tuple[str, str | int]]) -> None:
        """Set the values of keys that have none."""
        self._database.executemany("INSERT OR IGNORE INTO map VALUES (?, ?)", items)

    def replace(self, items: Iterable[tuple[str, str | int]]) -> None:
        """Set values, and replace existing ones."""
        self._database.executemany("INSERT OR REPLACE INTO map VALUES (?, ?)", items)

    def add(self, items: Iterable[tuple[str, int]]) -> None:
        """Add to the numbers of keys; a missing number counts as 0."""
        statement = "INSERT INTO map VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = value + excluded.value"
        self._database.executemany(statement, items)

    def get(self, key: str) -> str | int | None:
        row = self._database.execute("SELECT value FROM map WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], processes: int, ahead: int = ITEMS_AHEAD
) -> Iterator[R]:
    """Yield the results of `map(function, items)`, computed in `processes` forked processes, or in this one for 1.

    Items and results are pickled, but not the function. An exception in a worker is raised here. At most `ahead` items
    per process are processed or waiting.
    """
    if processes == 1:
        yield from map(function, items)
        return
    futures: deque = deque()
    with ProcessPoolExecutor(processes, get_context("fork"), _start, (function, os.getpid())) as pool:
        gc.freeze()  # otherwise the garbage collectors write to shared memory pages, which are then copied
        try:
            for item in items:
                futures.append(pool.submit(_call, item))
                if len(futures) == ahead * processes:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            # With wait=False, not even the `with` waits, and Python's exit could write to a pipe that is being closed.
            pool.shutdown(cancel_futures=True)
            gc.unfreeze()


def end_with_parent(parent: int | None = None) -> None:
    """Let Linux kill this forked process when its parent dies.

    Otherwise a pool's worker would wait forever, and so would a reader of its output. A parent that is already dead
    sends no signal, so its process id is compared if it is known.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


def _start(function: Callable, parent: int) -> None:
    global _function
    end_with_parent(parent)
    _function = function


def _call(item):
    return _function(item)


def read_objects(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield line number (from 1) and object; blank lines are counted and skipped."""
    with open_input(path, "rb") as file:
        for number, raw in enumerate(iter(partial(file.readline, MAX_ROW + 1), b""), start=1):
            location = f"{path}, line {number}"
            if len(raw) > MAX_ROW:
                raise make_row_size_error(location)
            raw = raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").rstrip(b"\r\n")
            if not raw.strip():
                continue
            try:
                row = parse_json(check_no_null(raw.decode("utf-8"), location))
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{location}: not UTF-8 ({error}); save the file as UTF-8, or delete the line"
                ) from None
            except json.JSONDecodeError as error:
                detail = f"{error.msg}, column {error.colno}"
                raise InputError(f"{location}: not one JSON object ({detail}); fix or delete the line") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{location}: not one JSON object ({error}); fix or delete the line") from None
            yield number, check_object(row, location)


def read_list_or_lines(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield number (from 1) and object of each row of a JSON list, or line of a `.jsonl` file."""
    if Path(path).suffix.lower() == ".jsonl":
        yield from read_objects(path)
        return
    for number, row in enumerate(read_json_list(path), start=1):
        yield number, check_object(row, f"{path}, row {number}")


def find_first_character(path: str | Path) -> str:
    """Return the first character of a text file that is not a space, if it is near the beginning, or ""."""
    with open_input(path, "rb") as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1].decode("latin-1")


def make_row_size_error(location: str, size: int | None = None) -> InputError:
    """Return the error for a row of `size` bytes; None: the row was not read to its end."""
    amount = f"more than {MAX_ROW}" if size is None else str(size)
    return InputError(
        f"{location}: the row has {amount} bytes; at most {MAX_ROW} (32 MiB) are allowed. Shorten or delete it"
    )


def _build_object(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object; raise ValueError for a repeated key, whose first value Python's reader would drop."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {quote_value(twice)} occurs twice in an object")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_build_object)


def parse_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or an object has a repeated key.
        RecursionError: its brackets are nested too deeply.
    """
    return DECODER.decode(text)


def read_json_file(path: str | Path) -> object:
    """Return the content of an untrusted JSON file."""
    try:
        with open_input(path) as file:
            if (size := os.stat(path).st_size) > MAX_JSON:
                raise InputError(
                    f"{path}: the file has {size} bytes; at most {MAX_JSON} are allowed for JSON. Check the path"
                )
            return parse_json(check_no_null(file.read(), path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); fix the file") from None


@contextmanager
def open_input(path: str | Path, mode: str = "r", newline: str | None = None) -> Iterator[IO]:
    """Open a user's file, as bytes or as UTF-8 with or without a byte order mark."""
    remedy = "check the paths in config/datasets/, under `benchmarks`, or on the command line"
    try:
        file_mode = os.stat(path).st_mode
        if not stat.S_ISREG(file_mode):
            raise InputError(f"{path} is {'a folder' if stat.S_ISDIR(file_mode) else 'not a regular file'}; {remedy}")
        with open(path, mode, encoding=None if "b" in mode else "utf-8-sig", newline=newline) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist; {remedy}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def check_object(row: object, location: str) -> dict:
    """Return the row; raise InputError unless it is a JSON object that can be written again."""
    if not isinstance(row, dict):
        raise InputError(f"{location}: expected a JSON object, found {type(row).__name__}")
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InputError(
            f"{location}: half of a surrogate pair (\\u{ord(half):04x}) is not a character; fix or delete the row"
        ) from None
    except ValueError:
        raise InputError(
            f"{location}: a number is NaN, infinite or too large for JSON; fix or delete the row"
        ) from None
    except RecursionError:
        text = "[" * (MAX_ROW_DEPTH + 1)
    if text.count("[") + text.count("{") > MAX_ROW_DEPTH and _is_deep(row):
        raise InputError(
            f"{location}: lists and objects are nested more than {MAX_ROW_DEPTH} levels deep; fix or delete the row"
        )
    return row


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_ROW_DEPTH):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, dict | list) for item in level)


class LineIndex:
    """Lines of a file as JSON objects, read by index; memory holds eight bytes per line."""

    def __init__(self, path: str | Path):
        self.path = path
        with open(path, "rb") as file:
            self.starts = array("q", accumulate((len(line) for line in file), initial=0))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> dict:
        if not 0 <= number < len(self):
            raise IndexError(number)
        with open(self.path, "rb") as file:
            file.seek(self.starts[number])
            with readable(f"{self.path}, line {number + 1},"):
                return json.loads(file.readline())


def parse_identifier(value: object, location: str) -> str | None:
    """Return a row's id as a string, None if it has none; 1 and "1" are the same id.

    Other types are refused, because their text could depend on the program that wrote them (`1.0`, `True`).
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise InputError(
        f"{location}: 'id' must be a string or an integer, found {quote_value(value)} ({type(value).__name__}); "
        "write it as a string, or leave it out"
    )


class UniqueIds:
    """Ids of a file with their first rows; a repeated id is an error."""

    def __init__(self, path: str | Path):
        self.path = path
        self.first_seen = DiskMap()

    def add(self, identifier: str, number: int) -> None:
        first = self.first_seen.setdefault(identifier, number)
        if first != number:
            raise InputError(
                f"{self.path}, row {number}: id {quote_value(identifier)} is already the id of row {first}; ids "
                "must be unique"
            )


class NumberedIds:
    """Unique ids for repeated ones: the second row of id `7` gets `7~2`, or the next number that no earlier row has.

    `mark` separates id and number.
    """

    def __init__(self, mark: str):
        self.mark = mark
        self.last = DiskMap()  # last number appended to each id, original or numbered

    def add(self, identifier: str) -> str:
        """Return the unique id of a row with this id."""
        if (last := self.last.get(identifier)) is None:
            self.last.fill([(identifier, 1)])
            return identifier
        numbered = ((f"{identifier}{self.mark}{number}", number) for number in count(last + 1))
        unique, number = next(pair for pair in numbered if pair[0] not in self.last)
        self.last.replace([(identifier, number), (unique, 1)])
        return unique


# A JSON file that is one list, read item by item, because published files have a gigabyte.
#
# ijson 3.6 cannot be used: it replaces half a surrogate pair by a question mark, and takes all memory for a file of
# nested brackets.

DECODE = DECODER.raw_decode


def read_json_list(path: str | Path) -> Iterator[object]:
    """Yield the items as `json.loads` would return them."""
    with open_input(path) as file:
        text, at, before, end, number = "", 0, BEFORE_FIRST, EMPTY, 1
        while True:
            try:
                item, after = _decode_item(text, at, before)
                problem = ""
            except json.JSONDecodeError as error:
                after, problem = len(text) if _may_be_cut(text, error) else at, error.msg
            except (ValueError, RecursionError) as error:  # integers of thousands of digits, endless brackets
                raise InputError(f"{path}, row {number}: not valid JSON ({error}); fix the file") from None
            # the text may end anywhere, also inside a number: 1 of 1.5, or 1. before 5
            if after == len(text) and after - at > MAX_ROW:
                raise make_row_size_error(f"{path}, row {number}")
            if REST_OF_NUMBER.fullmatch(text, after) and (
                more := _read(file, path, max(CHUNK_CHARACTERS, len(text) - at))
            ):
                text, at = text[at:] + more, 0
                continue
            if after == len(text) and end.match(text, at):
                return
            if problem or after == len(text):
                if before is BEFORE_FIRST and not before.match(text):
                    other = "something else" if text else "an empty file"
                    content = OBJECT_FOUND if text.lstrip().startswith("{") else other
                    raise InputError(
                        f"{path}: expected a JSON list, found {content}; check that this is the right file"
                    )
                raise InputError(
                    f"{path}, row {number}: not valid JSON ({problem or 'the list does not end'}); fix the file"
                )
            yield item
            at, before, end, number = after, BEFORE_NEXT, END, number + 1


def _decode_item(text: str, at: int, before: re.Pattern) -> tuple[object, int]:
    """Return the item after the separator, and its end."""
    gap = before.match(text, at)
    if gap is None:
        raise json.JSONDecodeError("Expecting ',' delimiter", text, SPACE.match(text, at).end())
    return DECODE(text, gap.end())


def _may_be_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether the text may end too early: inside a string or a word like `null`, or after the last item."""
    in_string = error.msg.startswith("Unterminated string")
    return in_string or error.pos >= len(text) - MAX_WORD_LENGTH or text.startswith("]", error.pos)


def _read(file: IO[str], path: str | Path, characters: int) -> str:
    try:
        return check_no_null(file.read(characters), path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
