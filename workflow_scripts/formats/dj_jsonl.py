"""Data-Juicer's image–text format: one JSON object a line.

    {"id": "000784545", "text": "<__dj__image>\\na white chandelier <|__dj__eoc|>", "images": ["images/000784545.jpg"]}

Image paths are relative to the dataset's image folder. A row may have a `question`, which stage 1 of a model with a
chat template asks.
"""

from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from formats.rows import UniqueIds, read_objects

IMAGE_TOKEN = "<__dj__image>"
END_OF_CHUNK = "<|__dj__eoc|>"


def text_of(caption: str) -> str:
    """Data-Juicer's `text` for one image with this caption."""
    return f"{IMAGE_TOKEN}\n{caption} {END_OF_CHUNK}"


def caption_of(text: str) -> str:
    """The caption inside a Data-Juicer `text`: all but the image token and the end of the last chunk."""
    return text.replace(IMAGE_TOKEN, "").strip().removesuffix(END_OF_CHUNK).strip()


def read_dj_jsonl(path: str | Path) -> Iterator[dict]:
    """Yield validated rows: a unique string `id`, one image, and a `text` with exactly one image token.

    Raises:
        InputError: names the file, the line and the remedy.
    """
    ids = UniqueIds(path)
    for number, row in read_objects(path):
        where = f"{path}, line {number}"
        for key, kind in (("id", str), ("text", str), ("images", list)):
            if key not in row:
                raise InputError(f"{where}: key {key!r} is missing; a row needs id, text and images")
            if not isinstance(row[key], kind):
                raise InputError(f"{where}: {key!r} must be a {kind.__name__}, found {type(row[key]).__name__}")
        ids.add(row["id"], number)
        if len(row["images"]) != 1 or not isinstance(row["images"][0], str):
            raise InputError(f"{where}: 'images' must hold exactly one path, found {row['images']!r}")
        if (tokens := row["text"].count(IMAGE_TOKEN)) != 1:
            raise InputError(
                f"{where}: 'text' must hold the image token {IMAGE_TOKEN} exactly once, found {tokens}; "
                f"write {IMAGE_TOKEN}\\n<caption> {END_OF_CHUNK}"
            )
        if not isinstance(row.get("question", ""), str):
            raise InputError(f"{where}: 'question' must be text, found {row['question']!r}; or leave it out")
        yield row
