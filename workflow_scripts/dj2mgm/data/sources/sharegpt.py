"""Reader of ShareGPT's and OpenAI's conversations, a JSON list or one object per line.

Turns are in `conversations` or `messages`, image paths in `images` or `image`, in parts of the turns, or under other
names (row_media.py).
"""

from collections.abc import Iterator

from dj2mgm.data.formats import read_list_or_lines
from dj2mgm.data.json_rows import parse_identifier
from dj2mgm.data.sources.source import Source, build_conversation_row
from dj2mgm.dataset_resolution.row_media import has_empty_image, read_row_media
from dj2mgm.errors import InputError


def read(source: Source) -> Iterator[dict]:
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
