"""Reading JSON and jsonl with errors that name the file and the line."""

import codecs
import json
import os
import stat
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, count
from pathlib import Path
from typing import IO

from disk_map import DiskMap
from errors import InputError
from files import readable

DEEPEST = 100  # lists and objects inside each other; pickling a row for another process recurses


def read_objects(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number from 1, object). Blank lines are errors too: they hide truncated writes."""
    with open_input(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                row = json.loads(raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8"))
            except UnicodeDecodeError as error:
                raise InputError(f"{where}: not UTF-8 ({error}); save the file as UTF-8, or delete the line") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not one JSON object ({error}); fix or delete the line") from None
            yield number, check_object(row, where)


def read_json_file(path: str | Path) -> object:
    """The content of a JSON file that somebody else wrote."""
    try:
        with open_input(path) as file:
            return json.load(file)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); fix the file") from None


@contextmanager
def open_input(path: str | Path, mode: str = "r", newline: str | None = None) -> Iterator[IO]:
    """Open a file that somebody brings, as bytes or as UTF-8 with or without a byte order mark.

    Raises:
        InputError: there is no such file, it is a folder or a device, or it cannot be read.
    """
    remedy = "check the paths in config/datasets/, under `benchmarks`, or on the command line"
    try:
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):
            raise InputError(f"{path} is {'a folder' if stat.S_ISDIR(kind) else 'no regular file'}; {remedy}")
        with open(path, mode, encoding=None if "b" in mode else "utf-8-sig", newline=newline) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist; {remedy}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def check_object(row: object, where: str) -> dict:
    """The row itself, if it is a JSON object that can be written again."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(row).__name__}")
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InputError(
            f"{where}: half of a surrogate pair (\\u{ord(half):04x}) is no character; fix or delete the row"
        ) from None
    except ValueError:
        raise InputError(f"{where}: a number is NaN, infinite or too large for JSON; fix or delete the row") from None
    except RecursionError:
        text = "[" * (DEEPEST + 1)
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(row):
        raise InputError(f"{where}: more than {DEEPEST} lists and objects inside each other; fix or delete the row")
    return row


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, dict | list) for item in level)


class LineIndex:
    """Any line of a file as a JSON object; in memory are eight bytes for each line."""

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


class UniqueIds:
    """Remembers where each id was first seen; a repeated id is an error."""

    def __init__(self, path: str | Path):
        self.path = path
        self.first_seen = DiskMap()

    def add(self, identifier: str, number: int) -> None:
        first = self.first_seen.setdefault(identifier, number)
        if first != number:
            raise InputError(
                f"{self.path}, row {number}: id {identifier!r} was used before, in row {first}; ids must be unique"
            )


class NumberedIds:
    """Makes repeated ids unique: the second row of an id `7` gets `7~2`, or the next number that no row before has.

    Args:
        mark: what stands between an id and its number.
    """

    def __init__(self, mark: str):
        self.mark = mark
        self.last = DiskMap()  # of each id so far, given or made: the last number that was put behind it

    def add(self, identifier: str) -> str:
        """The id to use for a row whose own is this one."""
        if (last := self.last.get(identifier)) is None:
            self.last.fill([(identifier, 1)])
            return identifier
        numbered = ((f"{identifier}{self.mark}{number}", number) for number in count(last + 1))
        unique, number = next(pair for pair in numbered if pair[0] not in self.last)
        self.last.replace([(identifier, number), (unique, 1)])
        return unique
