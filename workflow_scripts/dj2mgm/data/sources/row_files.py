"""Readers of files of rows that name images: Data-Juicer's pairs, conversations, and tables.

Conversations are LLaVA's, ShareGPT's or OpenAI's, in a JSON list or one object per line. Turns of the latter two are in
`conversations` or `messages`, image paths in `images` or `image`, in parts of the turns, or under other names
(row_media.py). Tables of paths and captions are `.csv`, `.tsv`, or JSON objects. Their separator follows from the first
line. Cells of .csv and .tsv are plain strings: `nan`, `NULL` and `NA`, which some readers take for missing values, are
words.
"""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.data.formats import build_conversation, read_llava, read_pairs
from dj2mgm.data.sources.source import Source, build_conversation_row, find_column, read_cell
from dj2mgm.dataset_resolution.file_samples import LOOK_FOR, read_table_rows
from dj2mgm.dataset_resolution.row_media import find_unread_media, has_empty_image, read_row_media
from dj2mgm.errors import InputError
from dj2mgm.storage.json_rows import parse_identifier, read_list_or_lines


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
