"""Reader of arrow streams, in which `save_to_disk` of Hugging Face datasets writes its rows.

Only bytes are read. A dataset's script, pickled objects and extension types are never loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from dj2mgm.data.json_rows import open_input
from dj2mgm.data.sources.parquet import MAX_BATCH, MAX_ROWS, OpenTable, read_tables
from dj2mgm.data.sources.source import Source
from dj2mgm.dataset_resolution.file_samples import STREAM, list_cached
from dj2mgm.errors import InputError

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read(source: Source) -> Iterator[dict]:
    cached = list_cached(source.files)
    for file in sorted(cached):
        source.unread.add(str(file))
    saved = replace(source, files=tuple(file for file in source.files if file not in cached))
    yield from read_tables(saved, _open_stream, STREAM)


@contextmanager
def _open_stream(file: Path) -> Iterator[OpenTable]:
    """Map a stream into memory, so that only the batch that is read takes memory.

    Raises:
        InputError: the stream has no end, so rows may be missing. pyarrow accepts this.
    """
    with open_input(file, "rb") as content:
        size = content.seek(0, 2)
        content.seek(max(0, size - len(END_OF_STREAM)))
        if size and content.read() != END_OF_STREAM:
            raise InputError(f"{file} is not complete, or not {STREAM}; download or save it again")
    with pa.memory_map(str(file)) as content, pa.ipc.open_stream(content) as stream:
        yield stream.schema, lambda columns: _read_batches(stream, columns)


def _read_batches(stream: pa.RecordBatchReader, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for whole_batch in stream:
        batch = whole_batch.select(columns)
        batch.validate(full=True)  # pyarrow does not check the offsets of untrusted streams
        row_count = max(1, min(MAX_ROWS, MAX_BATCH * len(batch) // max(1, batch.nbytes)))
        for start in range(0, len(batch), row_count):
            yield batch.slice(start, row_count)
