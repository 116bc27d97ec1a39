"""Finds the columns of a table by their usual names or the user's."""

from collections.abc import Sequence
from pathlib import Path

from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError

USUAL = {  # names in published datasets, the most likely first
    "image": ("image", "images", "img", "jpg", "image_path", "file_name", "path"),
    "text": ("caption", "text", "txt", "captions"),
    "question": ("question",),
    "conversations": ("conversations", "messages", "texts"),
}


def find_column(file: Path, there: Sequence[str], kind: str, source: Source, needed: bool = True) -> str | None:
    """Return the user's name of one of our columns; None if there is none."""
    if name := source.columns.get(kind):
        if name not in there:
            raise InputError(f"{file}: column {name!r} is missing; the columns are {', '.join(there)}")
        return check_single(file, there, name)
    found = next((name for name in USUAL[kind] if name in there), None)
    if found is None and needed:
        raise InputError(
            f"{file}: no column for the {kind} ({', '.join(USUAL[kind])}); the columns are {', '.join(there)}. Name "
            f"yours under sources.{source.name}.columns"
        )
    return found and check_single(file, there, found)


def check_single(file: Path, there: Sequence[str], name: str) -> str:
    """Return the name of an existing column, unless several columns have it."""
    if there.count(name) > 1:
        raise InputError(f"{file}: several columns are named {name!r}; rename all but one")
    return name
