"""Which of a table's columns holds what."""

from collections.abc import Sequence
from pathlib import Path

from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError

USUAL = {  # names in published datasets, the likeliest first
    "image": ("image", "images", "img", "jpg", "image_path", "file_name", "path"),
    "text": ("caption", "text", "txt", "captions"),
    "question": ("question",),
    "conversations": ("conversations", "messages", "texts"),
}


def find_column(file: Path, there: Sequence[str], kind: str, source: Source, needed: bool = True) -> str | None:
    """The name of the user's column for one of ours; None where there is none.

    Raises:
        InputError: the column is missing, or several have its name.
    """
    if name := source.columns.get(kind):
        if name not in there:
            raise InputError(f"{file}: there is no column {name!r}; it has {', '.join(there)}")
        return check_single(file, there, name)
    found = next((name for name in USUAL[kind] if name in there), None)
    if found is None and needed:
        raise InputError(
            f"{file}: no column for the {kind} ({', '.join(USUAL[kind])}); it has {', '.join(there)}: name yours under "
            f"sources.{source.name}.columns"
        )
    return found and check_single(file, there, found)


def check_single(file: Path, there: Sequence[str], name: str) -> str:
    """Return the name of a column that is there.

    Raises:
        InputError: several columns have this name.
    """
    if there.count(name) > 1:
        raise InputError(f"{file}: several columns are called {name!r}; rename all but one")
    return name
