"""Text corpora: jsonl with one {"text": …} a line."""

from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from formats.rows import read_objects


def read_texts(path: Path) -> Iterator[str]:
    """
    Raises:
        InputError: the file, or a row that is no object with a text, by number.
    """
    for number, row in read_objects(path):
        text = row.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}, line {number}: expected a non-empty `text`")
        yield text
