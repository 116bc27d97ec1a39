"""A table of paths and captions: comma-separated values (`.csv`), or separated by tabs (`.tsv`)."""

import csv
from collections.abc import Iterator

from dj2mgm.data.formats import conversation
from dj2mgm.data.rows import open_input
from dj2mgm.data.sources.columns import find_column
from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError


def read(source: Source) -> Iterator[dict]:
    for file in source.files:
        with open_input(file, newline="") as lines:
            tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix.lower() == ".tsv" else {}
            rows = csv.DictReader(lines, strict=True, **tabs)
            try:
                there = list(rows.fieldnames or ())
                image, text = (find_column(file, there, kind, source) for kind in ("image", "text"))
                question = find_column(file, there, "question", source, needed=False)
                for number, row in enumerate(rows, start=2):
                    if None in row or None in row.values():
                        raise InputError(f"{file}, row {number}: it has not as many values as the first row has names")
                    yield conversation(f"{file.stem}-{number:09d}", row[image], row.get(question, ""), row[text])
            except (csv.Error, UnicodeDecodeError) as error:
                raise InputError(f"{file}, line {rows.line_num + 1}: {error}; save the table as UTF-8 text") from None
