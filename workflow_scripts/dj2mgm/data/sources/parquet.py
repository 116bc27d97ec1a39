"""Readers of parquet and arrow in the layout of Hugging Face datasets, with images as bytes in a column.

Arrow streams are what `save_to_disk` of these datasets writes. Only bytes are read. A dataset's script, pickled objects
and extension types are never loaded.

Bytes in a compressed column cannot be read in any order; one image means decompressing a row group. So images are
copied unchanged into tar files in the dataset's folder, equal bytes only once, and read there.
"""

import errno
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dj2mgm.data.formats import build_conversation
from dj2mgm.data.sources.source import Source, build_conversation_row, check_single, find_column, read_cell
from dj2mgm.dataset_resolution.file_samples import STREAM, list_cached
from dj2mgm.dataset_resolution.row_media import find_unread_media, read_row_media
from dj2mgm.errors import InputError, quote_value
from dj2mgm.storage.image_files import IMAGE_SUFFIXES, Member
from dj2mgm.storage.streaming import MAX_ROW, DiskMap, check_object, make_row_size_error, open_input, parse_identifier

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
MAX_ROWS = 64  # most rows per batch
MAX_BATCH = 2**27  # most bytes per batch
SHARD_BYTES = 2**30
MAX_MEMBER_NAME = tarfile.LENGTH_NAME  # bytes in a header


# the schema, and a function that yields batches of some columns
OpenTable = tuple[pa.Schema, Callable[[list[str]], Iterator[pa.RecordBatch]]]


def read_parquet(source: Source) -> Iterator[dict]:
    yield from read_tables(source, _open_parquet, "a parquet file")


@contextmanager
def _open_parquet(file: Path) -> Iterator[OpenTable]:
    with pq.ParquetFile(file) as table:
        yield (
            table.schema_arrow,
            lambda columns: table.iter_batches(_choose_batch_size(table, columns), columns=columns),
        )


def read_tables(
    source: Source, open_table: Callable[[Path], AbstractContextManager[OpenTable]], title: str
) -> Iterator[dict]:
    """Yield the rows of a source's files, whose format has this title in messages."""
    copied = DiskMap()  # paths of images by the digests of their bytes
    for number, file in enumerate(source.files):
        try:
            with open_table(file) as table:
                yield from _read_file(source, file, number, copied, table)
        except (pa.ArrowException, OSError, UnicodeError) as error:
            if getattr(error, "errno", None) in WRITE_ERRORS:  # from writing the copy, not from reading
                raise
            raise InputError(f"{file} is damaged or not {title} ({error}); download it again") from None


def _read_file(source: Source, file: Path, number: int, copied: DiskMap, table: OpenTable) -> Iterator[dict]:
    """Yield the rows of file `number`; `copied` has the paths of images that earlier files share."""
    schema, read_batches = table
    column_names = schema.names
    with TarWriter(source.output, number, copied) as images:
        image = find_column(file, column_names, "image", source)
        turns = find_column(file, column_names, "conversations", source, needed=False)
        text = None if turns else find_column(file, column_names, "text", source)
        question = None if turns else find_column(file, column_names, "question", source, needed=False)
        identifier = check_single(file, column_names, "id") if "id" in column_names else None
        used = [column for column in (image, turns, text, question, identifier) if column]
        others = [field.name for field in schema if field.name not in used and _may_name_media(field.type)]
        columns = [*used, *dict.fromkeys(check_single(file, column_names, name) for name in others)]
        row_number = 0
        for batch in read_batches(columns):
            _check_texts(batch.drop_columns([image, *others]), file, row_number)
            for row in _read_values(batch, file, row_number):
                row_number += 1
                location = f"{file}, row {row_number}"
                row_name = f"{file.stem}-{row_number:09d}"
                name = (parse_identifier(row[identifier], location) if identifier else None) or row_name
                values = _as_list(row[image]) or ([] if turns else [None])
                paths = [images.add(value, location, row_name) for value in values]
                unused = {name: row[name] for name in others}
                if turns:
                    check_object({"turns": row[turns]}, location)
                    media = read_row_media(unused | {"conversations": row[turns]}, stored=paths)
                    yield build_conversation_row(name, media, row[turns], location)
                    continue
                if len(paths) != 1:
                    raise InputError(f"{location}: it has {len(paths)} images, but a caption belongs to one")
                caption = read_cell(row[text], text, location)
                prompt = read_cell(row[question], question, location) if question else ""
                unread = find_unread_media(unused, paths, stored=True)
                yield build_conversation(name, paths[0], prompt, caption, unread)


def _may_name_media(data_type: pa.DataType) -> bool:
    """Return whether values of a type may hold strings or bytes; extension types are not read."""
    if pa.types.is_dictionary(data_type):
        return _may_name_media(data_type.value_type)
    if pa.types.is_nested(data_type):
        return any(_may_name_media(data_type.field(number).type) for number in range(data_type.num_fields))
    return not (pa.types.is_primitive(data_type) or isinstance(data_type, pa.BaseExtensionType))


def _choose_batch_size(table: pq.ParquetFile, columns: list[str]) -> int:
    """Return the number of rows per batch; it is small if one value could fill a large part of a row group."""
    groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
    parts = ([group.column(number) for number in range(group.num_columns)] for group in groups)
    largest = max(
        (
            sum(part.total_uncompressed_size for part in group if part.path_in_schema.partition(".")[0] in columns)
            for group in parts
        ),
        default=0,
    )
    return max(1, min(MAX_ROWS, MAX_BATCH // max(1, largest)))


def _read_values(batch: pa.RecordBatch, file: Path, before: int) -> list[dict]:
    """Return the rows of a batch that begins after `before` rows as Python objects."""
    try:
        return batch.to_pylist()
    except UnicodeError:
        raise
    except (ValueError, OverflowError) as error:
        rows = f"rows {before + 1} to {before + len(batch)}"
        raise InputError(
            f"{file}, {rows}: a value cannot be read ({error}); write ids and texts as strings, and each key of an "
            "image only once"
        ) from None


def _decode(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace indices into dictionaries by their values; a dictionary may also hold values of no row."""
    for number, column in enumerate(batch.columns):
        if pa.types.is_dictionary(column.type):
            batch = batch.set_column(number, batch.schema.names[number], column.dictionary_decode())
    return batch


def _check_texts(batch: pa.RecordBatch, file: Path, before: int) -> None:
    """Raise InputError for a row with too long texts before they are copied to Python objects."""
    if batch.nbytes > MAX_ROW:
        for number in range(len(batch)):
            if (size := _decode(batch.slice(number, 1)).nbytes) > MAX_ROW:
                raise make_row_size_error(f"{file}, row {before + number + 1}", size)


def _as_list(value: object) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _choose_member_name(path: object, row_name: str) -> str:
    """Return the file name of an image, with which pages show it; `row_name` if a tar file cannot store it."""
    name = path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""
    suffix = Path(name).suffix.lower()
    for choice in (name, f"{row_name}{suffix}") if suffix in IMAGE_SUFFIXES else (row_name,):
        if choice.isprintable() and len(choice.encode()) <= MAX_MEMBER_NAME:
            return choice
    return f"image{suffix}" if suffix in IMAGE_SUFFIXES else "image"


class TarWriter:
    """Writer of images into numbered tar files of about SHARD_BYTES; equal images are written once.

    Args:
        folder: folder of the tar files.
        number: number of the parquet file, the first part of the tar files' names.
        copied: paths of written images by the digests of their bytes, relative to `folder`.
    """

    def __init__(self, folder: Path, number: int, copied: DiskMap):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.number, self.copied = folder, number, copied
        self.shard = 0
        self.tar: tarfile.TarFile | None = None

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self.tar:
            self.tar.close()

    def add(self, value: object, location: str, row_name: str) -> str:
        """Write an image, unless the same bytes are written already; return its path.

        Args:
            value: bytes, or datasets' `{bytes, path}`; null is an empty image.
            location: file and row, for messages.
            row_name: file and row, for the name of an image that has none.
        """
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        others = {key: other for key, other in value.items() if other is not None} if isinstance(value, dict) else {}
        if content is None and path is None and (others or (isinstance(value, dict) and "bytes" not in value)):
            raise InputError(
                f"{location}: its image has the keys {', '.join(value)}, but no bytes under 'bytes', the key of "
                "datasets' Image feature; rename the key"
            )
        if content is None and path is None:
            content = b""
        if not isinstance(content, bytes):
            actual = f"only the path {quote_value(path)}" if content is None else type(content).__name__
            raise InputError(
                f"{location}: its image must be bytes, found {actual}; store it with datasets' Image feature"
            )
        digest = hashlib.sha256(content).hexdigest()
        if (path_before := self.copied.get(digest)) is not None:
            return path_before
        if self.tar is None or self.tar.offset > SHARD_BYTES:
            self.__exit__()
            self.tar = tarfile.open(self.folder / self._name(), "w", format=tarfile.USTAR_FORMAT)
            self.shard += 1
        name = self._name(self.shard - 1)
        info = tarfile.TarInfo(_choose_member_name(path, row_name))
        info.size = len(content)
        offset = self.tar.offset + tarfile.BLOCKSIZE
        self.tar.addfile(info, io.BytesIO(content))
        member_path = str(Member(name, offset, len(content), info.name))
        self.copied.fill([(digest, member_path)])
        return member_path

    def _name(self, shard: int | None = None) -> str:
        return f"{self.number:05d}-{self.shard if shard is None else shard:05d}.tar"


END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow(source: Source) -> Iterator[dict]:
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
