"""A JSON file that is one list, item by item: published ones have a gigabyte, which is never held at once.

ijson 3.6 is no choice: it puts a question mark for half a surrogate pair, and takes all memory for a file of nested
brackets.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from errors import InputError
from formats.rows import open_input, read_json_file

CHUNK = 1 << 16  # characters of a list that are read at a time, or more where an item has more
DECODE = json.JSONDecoder().raw_decode
BEFORE_FIRST, BEFORE_NEXT = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*")
REST_OF_NUMBER = re.compile(r"[-+.eE\d]*")  # empty, too
SPACE, LONGEST_WORD = re.compile(r"\s*"), len("-Infinity")
EMPTY, END = re.compile(r"\s*\[\s*\]\s*\Z"), re.compile(r"\s*\]\s*\Z")


def read_json_list(path: str | Path) -> Iterator[object]:
    """Yield the items, each as `json.loads` has it.

    Raises:
        InputError: names the file, the row (from 1) and what is wrong there.
    """
    with open_input(path) as file:
        text, at, before, end, number = "", 0, BEFORE_FIRST, EMPTY, 1
        while True:
            try:
                item, after = _decode_item(text, at, before)
                problem = ""
            except json.JSONDecodeError as error:
                after, problem = len(text) if _may_be_cut(text, error) else at, error.msg
            except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets without end
                raise InputError(f"{path}, row {number}: not valid JSON ({error}); fix the file") from None
            # what is there may be cut off anywhere, in a number too: 1 of 1.5, and of 1. where 5 is still to come
            if REST_OF_NUMBER.fullmatch(text, after) and (more := _read(file, path, max(CHUNK, len(text) - at))):
                text, at = text[at:] + more, 0
                continue
            if after == len(text) and end.match(text, at):
                return
            if problem or after == len(text):
                if before is BEFORE_FIRST and not before.match(text):
                    found = type(read_json_file(path)).__name__
                    raise InputError(f"{path}: expected a JSON list, found {found}")
                raise InputError(
                    f"{path}, row {number}: not valid JSON ({problem or 'the list does not end'}); fix the file"
                )
            yield item
            at, before, end, number = after, BEFORE_NEXT, END, number + 1


def _decode_item(text: str, at: int, before: re.Pattern) -> tuple[object, int]:
    """The item after what comes before it, and where it ends."""
    gap = before.match(text, at)
    if gap is None:
        raise json.JSONDecodeError("Expecting ',' delimiter", text, SPACE.match(text, at).end())
    return DECODE(text, gap.end())


def _may_be_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Whether more of the file could complete it: in a string, in a word like `null`, behind the last item."""
    in_string = error.msg.startswith("Unterminated string")
    return in_string or error.pos >= len(text) - LONGEST_WORD or text.startswith("]", error.pos)


def _read(file: IO[str], path: str | Path, characters: int) -> str:
    try:
        return file.read(characters)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
