"""Source of a dataset, helpers for its readers, and readers of files of rows that name images.

Rows are Data-Juicer's pairs, conversations or tables. Conversations are LLaVA's, ShareGPT's or OpenAI's, in a JSON list
or one object per line. Turns of the latter two are in `conversations` or `messages`, image paths in `images` or
`image`, in parts of the turns, or under other names (row_media.py). Tables of paths and captions are `.csv`, `.tsv`, or
JSON objects. Their separator follows from the first line. Cells of .csv and .tsv are plain strings: `nan`, `NULL` and
`NA`, which some readers take for missing values, are words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from dj2mgm.data.formats import build_conversation, read_llava, read_pairs
from dj2mgm.dataset_resolution.file_samples import LOOK_FOR, read_table_rows
from dj2mgm.dataset_resolution.row_media import (
    IMAGE_TOKEN,
    UNREAD_MEDIA,
    RowMedia,
    find_unread_media,
    has_empty_image,
    read_content,
    read_row_media,
    replace_tagged_images,
)
from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.dataset_files import USUAL_NAMES, Columns
from dj2mgm.storage.streaming import parse_identifier, read_list_or_lines

MAX_EXAMPLES = 3  # names of files that are not used
LLAVA_ROLE = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "model": "gpt", "system": "system"}


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


def read_data_juicer(source: Source) -> Iterator[dict]:
    for file in source.files:
        yield from read_pairs(file)


def read_llava_files(source: Source) -> Iterator[dict]:
    for file in source.files:
        yield from read_llava(file, number_ids=True)


def read_sharegpt(source: Source) -> Iterator[dict]:
    for file in source.files:
        for number, row in read_list_or_lines(file):
            location = f"{file}, row {number}"
            media = read_row_media(row, ("images", "image"))
            turns = row.get("conversations") or row.get("messages")
            if turns is None:
                raise InputError(f"{location}: it has neither 'conversations' nor 'messages'; add its turns")
            if isinstance(turns, list) and row.get("system"):  # LLaMA-Factory's key
                turns = [{"role": "system", "content": row["system"]}, *turns]
            identifier = parse_identifier(row.get("id"), location)
            conversation = build_conversation_row(identifier or f"{file.stem}-{number:09d}", media, turns, location)
            yield conversation if media.images or not has_empty_image(row) else conversation | {"image": None}


def read_table(source: Source) -> Iterator[dict]:
    for file in source.files:
        read_file = _read_objects if file.suffix.lower() in (".json", ".jsonl") else _read_lines
        yield from read_file(source, file)


def _read_objects(source: Source, file: Path) -> Iterator[dict]:
    for number, row in read_list_or_lines(file):
        row_path, column_names = Path(f"{file}, row {number}"), list(row)
        location = str(row_path)
        image, text = (find_column(row_path, column_names, kind, source) for kind in ("image", "text"))
        question = find_column(row_path, column_names, "question", source, needed=False)
        if isinstance(row[image], list) and len(row[image]) != 1:
            raise InputError(f"{location}: it has {len(row[image])} images, but a caption belongs to one")
        prompt = read_cell(row[question], question, location) if question else ""
        identifier = parse_identifier(row.get("id"), location) or f"{file.stem}-{number:09d}"
        caption, path = read_cell(row[text], text, location), read_cell(row[image], image, location)
        unread = find_unread_media(row, [path], {image, text, question})
        yield build_conversation(identifier, path, prompt, caption, unread)


def _read_lines(source: Source, file: Path) -> Iterator[dict]:
    """Yield a pair per row of a table whose first line names its columns."""
    rows = read_table_rows(file)
    column_names, _ = next(rows, ([], 0))
    if not column_names:
        raise InputError(f"{file} is empty; its first line names the columns")
    image, text = (find_column(file, column_names, kind, source) for kind in ("image", "text"))
    question = find_column(file, column_names, "question", source, needed=False)
    for number, (row, line) in enumerate(rows, start=2):
        if len(row) != len(column_names):
            raise InputError(
                f"{file}, line {line}: it has {len(row)} values, but the first line has {len(column_names)} names; "
                f"{LOOK_FOR}, or delete the line"
            )
        cells = list(zip(column_names, row, strict=True))  # other columns than these may share a name
        values = dict(cells)
        others = ({name: value} for name, value in cells if name not in (image, text, question))
        phrases = (find_unread_media(other, [values[image]]) for other in others)
        prompt = values[question] if question else ""
        unread = next(filter(None, phrases), "")
        yield build_conversation(f"{file.stem}-{number:09d}", values[image], prompt, values[text], unread)
