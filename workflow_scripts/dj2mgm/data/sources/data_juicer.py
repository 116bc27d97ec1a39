"""Reader of pairs in Data-Juicer's jsonl or JSON list."""

from collections.abc import Iterator

from dj2mgm.data.formats import read_pairs
from dj2mgm.data.sources.source import Source


def read(source: Source) -> Iterator[dict]:
    for file in source.files:
        yield from read_pairs(file)
