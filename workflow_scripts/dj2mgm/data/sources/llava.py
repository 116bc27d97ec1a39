"""Reader of LLaVA's conversations, a JSON list or one object per line."""

from collections.abc import Iterator

from dj2mgm.data.formats import read_llava
from dj2mgm.data.sources.source import Source


def read(source: Source) -> Iterator[dict]:
    for file in source.files:
        yield from read_llava(file, number_ids=True)
