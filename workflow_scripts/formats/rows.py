"""Reading JSON and jsonl with errors that name the file and the line."""

import json
from array import array
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from disk_map import DiskMap
from errors import InputError


def read_objects(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number from 1, object). Blank lines are errors too: they hide truncated writes."""
    with open(existing(path), "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                row = json.loads(raw.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}: not one JSON object in UTF-8 ({error}); mend or delete the line"
                ) from None
            yield number, check_object(row, f"{path}, line {number}")


def read_json_file(path: str | Path) -> object:
    """The content of a JSON file that somebody else wrote."""
    try:
        return json.loads(existing(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); mend the file") from None


def existing(path: str | Path) -> Path:
    """The path of a file that somebody brings, if it is there."""
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path} does not exist; check the paths in config/datasets/, under `benchmarks`, or on the command line"
        )
    return path


def check_object(row: object, where: str) -> dict:
    """The row itself, if it is a JSON object whose texts can be written again."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InputError(
            f"{where}: half of a surrogate pair (\\u{ord(half):04x}) is no character; mend or delete the row"
        ) from None
    return row


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
