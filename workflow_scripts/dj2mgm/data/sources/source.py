"""Source of a dataset, and helpers for its readers, such as the search for columns by their usual names."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from dj2mgm.dataset_resolution.row_media import IMAGE_TOKEN, UNREAD_MEDIA, RowMedia, read_content, replace_tagged_images
from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.dataset_files import USUAL_NAMES, Columns

MAX_EXAMPLES = 3  # names of files that are not used


@dataclass
class SkippedFiles:
    """Files of a source that are not used, counted by suffix, with the names of the first ones."""

    counts: Counter = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        name = name.encode(errors="backslashreplace").decode()  # names that are not UTF-8
        self.counts[PurePath(name).suffix.lower() or PurePath(name).name] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(name)


def describe_unread(counts: Iterable[tuple[str, int]], format_name: str) -> str:
    """List unread files by suffix; text files in a folder of images could be read, but their images are missing."""
    notes = {".txt": " without an image that can be read"} if format_name == "folder" else {}
    return ", ".join(f"{count} {kind}{notes.get(kind, '')}" for kind, count in counts)


@dataclass(frozen=True)
class Source:
    """Files of a dataset that one reader reads, with their image folder and columns."""

    name: str
    files: tuple[Path, ...]  # files in reading order
    images: Path  # the folder that the rows' image paths are relative to
    columns: Columns = Columns()
    output: Path = Path()  # folder of files that the reader must write, such as images that cannot be read in place
    keep_uncaptioned: bool = False  # whether images without a caption get an empty one
    unread: SkippedFiles = field(default_factory=SkippedFiles)  # filled by image_folders.py or merged_sources.py
    uncaptioned: SkippedFiles = field(default_factory=SkippedFiles)  # filled by image_folders.py


def read_cell(value: object, name: str, location: str) -> str:
    """Return a caption or question: a string, the first string of a list, or "" for null."""
    value = next(iter(value), None) if isinstance(value, list) else value
    if value is not None and not isinstance(value, str):
        raise InputError(f"{location}: {quote_value(name)} must be a string, found {quote_value(value)}")
    return value or ""


LLAVA_ROLE = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "model": "gpt", "system": "system"}


def build_conversation_row(identifier: str, media: RowMedia, turns: object, location: str) -> dict:
    """Convert turns of ShareGPT, OpenAI or FineVision to LLaVA's form.

    System messages precede the first question. If no turn has an image token, the images come first.
    """
    images = list(media.images)
    messages = list(_read_turns(turns, location))
    system = [text for role, text in messages if role == "system"]
    messages = [(role, text) for role, text in messages if role != "system"]
    if (
        not messages
        or len(messages) % 2
        or any(role != ("human", "gpt")[index % 2] for index, (role, _) in enumerate(messages))
    ):
        raise InputError(f"{location}: turns must alternate between user and assistant, and end with the assistant")
    values = [text for _, text in messages]
    values[0] = "\n".join([*system, values[0]])
    if not any(IMAGE_TOKEN in value for value in values[::2]):
        values[0] = f"{IMAGE_TOKEN}\n" * len(images) + values[0]
    row: dict = {"id": identifier}
    if images:
        row["image"] = images[0] if len(images) == 1 else images
    row["conversations"] = [{"from": role, "value": value} for (role, _), value in zip(messages, values, strict=True)]
    return row | ({UNREAD_MEDIA: media.unread} if media.unread else {})


def _read_turns(turns: object, location: str) -> Iterable[tuple[str, str]]:
    """Yield role and text of each turn."""
    if not isinstance(turns, list):
        raise InputError(f"{location}: the conversation must be a list of turns, found {type(turns).__name__}")
    for number, turn in enumerate(turns, start=1):
        if isinstance(turn, dict) and isinstance(turn.get("user"), str) and isinstance(turn.get("assistant"), str):
            yield from (("human", turn["user"]), ("gpt", turn["assistant"]))
            continue
        speaker = (turn.get("from") or turn.get("role")) if isinstance(turn, dict) else None
        role = LLAVA_ROLE.get(speaker) if isinstance(speaker, str) else None
        content = read_content(turn.get("value", turn.get("content"))) if role else None
        if content is None:
            raise InputError(
                f"{location}: turn {number} must be {{'role': 'user' or 'assistant', 'content': text}} or "
                "{'from': 'human' or 'gpt', 'value': text}"
            )
        yield role, replace_tagged_images(content[0])


def find_column(file: Path, column_names: Sequence[str], kind: str, source: Source, needed: bool = True) -> str | None:
    """Return the name of the column that has a kind of content; without one, None, or InputError if it is needed.

    Args:
        file: name of the file, for messages.
        column_names: names of the file's columns.
        kind: a key of `USUAL_NAMES`.
        source: the source, whose `columns` may name the column.
        needed: whether a missing column is an error.
    """
    if name := getattr(source.columns, kind):
        if name not in column_names:
            raise InputError(
                f"{file}: column {quote_value(name)} is missing; the columns are {', '.join(column_names)}"
            )
        return check_single(file, column_names, name)
    column = next((name for name in USUAL_NAMES[kind] if name in column_names), None)
    if column is None and needed:
        raise InputError(
            f"{file}: no column for the {kind} ({', '.join(USUAL_NAMES[kind])}); the columns are "
            f"{', '.join(column_names)}. Name yours under sources.{source.name}.columns"
        )
    if column is None:
        return None
    return check_single(file, column_names, column)


def check_single(file: Path, column_names: Sequence[str], name: str) -> str:
    """Return `name`; raise InputError if several columns have it."""
    if column_names.count(name) > 1:
        raise InputError(f"{file}: several columns are named {quote_value(name)}; rename all but one")
    return name
