"""Readers of files of rows that name images: Data-Juicer's pairs, conversations, and tables.

Conversations are LLaVA's, ShareGPT's or OpenAI's, in a JSON list or one object per line. Turns of the latter two are in
`conversations` or `messages`, image paths in `images` or `image`, in parts of the turns, or under other names
(row_media.py). Tables of paths and captions are `.csv`, `.tsv`, or JSON objects. Their separator follows from the first
line. Cells of .csv and .tsv are plain strings: `nan`, `NULL` and `NA`, which some readers take for missing values, are
words.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dj2mgm.data.formats import build_conversation, read_list_or_lines, read_llava, read_pairs
from dj2mgm.data.json_rows import MAX_ROW, make_row_size_error, open_input, parse_identifier
from dj2mgm.data.sources.source import Source, build_conversation_row, find_column, read_cell
from dj2mgm.dataset_resolution.file_samples import find_dialect, is_separator_row
from dj2mgm.dataset_resolution.row_media import find_unread_media, has_empty_image, read_row_media
from dj2mgm.errors import InputError
from dj2mgm.storage.plain_files import MIB, check_no_null


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


LOOK_FOR = "look for a quote that is not closed or not doubled, or for an unquoted comma"

PLAIN_QUOTES = (
    ". A cell that begins with a quote is read as quoted, as pandas does; if your quotes are plain characters, double "
    "them and put the cell in quotes"
)


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
    """Yield a pair per row of a table whose first line names its columns; blank rows are skipped."""
    csv.field_size_limit(MAX_ROW)
    with open_input(file, "rb") as raw:
        dialect = find_dialect(file, raw.read(MIB).decode(errors="replace"))
        raw.seek(0)
        lines = _Lines(raw, file)
        rows = csv.reader(lines, strict=True, **dialect)
        column_names, _ = next(_skip_blank_rows(rows, lines), ([], 0))
        if column_names and is_separator_row(column_names):
            column_names, _ = next(_skip_blank_rows(rows, lines), ([], 0))
        if not column_names:
            raise InputError(f"{file} is empty; its first line names the columns")
        image, text = (_find_column_index(file, column_names, kind, source) for kind in ("image", "text"))
        question = _find_column_index(file, column_names, "question", source, needed=False)
        others = [index for index in range(len(column_names)) if index not in (image, text, question)]
        for number, (row, line) in enumerate(_skip_blank_rows(rows, lines), start=2):
            if len(row) != len(column_names):
                raise InputError(
                    f"{file}, line {line}: it has {len(row)} values, but the first line has {len(column_names)} names; "
                    f"{LOOK_FOR}, or delete the line"
                )
            prompt = "" if question is None else row[question]
            phrases = (find_unread_media({column_names[index]: row[index]}, [row[image]]) for index in others)
            unread = next(filter(None, phrases), "")
            yield build_conversation(f"{file.stem}-{number:09d}", row[image], prompt, row[text], unread)


class _Lines:
    """Lines of a table for csv.reader, which handles line ends itself.

    Attributes:
        row_size: characters since the start of the row; the caller resets it for each row.
    """

    def __init__(self, raw: IO[bytes], file: Path):
        self.text = io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="")
        self.file, self.number, self.row_size = file, 0, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        """Return the next line; raise InputError if it is not UTF-8 or makes its row longer than MAX_ROW characters."""
        line = self.text.readline(MAX_ROW + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.row_size += len(line)
        if self.row_size > MAX_ROW:
            raise make_row_size_error(f"{self.file}, line {self.number}")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF
            raise InputError(
                f"{self.file}, line {self.number}: not UTF-8 (byte 0x{byte:02x}); save the table as UTF-8"
            ) from None
        return check_no_null(line, f"{self.file}, line {self.number}")


def _skip_blank_rows(rows, lines: _Lines) -> Iterator[tuple[list[str], int]]:
    """Yield the rows of a csv.reader that are not blank, each with its first line number."""
    while True:
        line, lines.row_size = rows.line_num + 1, 0
        try:
            row = next(rows, None)
        except csv.Error as error:
            plain = PLAIN_QUOTES if lines.file.suffix.lower() == ".tsv" else ""
            raise InputError(
                f"{lines.file}, line {line}: {error}; {LOOK_FOR} in the row that begins at this line{plain}"
            ) from None
        if row is None:
            return
        if row:
            yield row, line


def _find_column_index(
    file: Path, column_names: list[str], kind: str, source: Source, needed: bool = True
) -> int | None:
    name = find_column(file, column_names, kind, source, needed)
    return None if name is None else column_names.index(name)
