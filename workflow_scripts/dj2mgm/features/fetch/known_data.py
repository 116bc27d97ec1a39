"""Downloads of datasets and benchmarks that config/hub describes, into folders that the workflow reads.

Parquet files are downloaded whole: the smallest number of files that contain the rows. Of a zip file, only the images
of the chosen rows are read, by ranges, and compared with the zip file's checksums. Benchmarks are converted to the
files that `benchmarks` names in the configuration.
"""

import base64
import csv
import fnmatch
import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.hf_api import RepoSibling

from dj2mgm.data.formats import read_llava
from dj2mgm.data.images import BadImageError, detect_suffix
from dj2mgm.dataset_resolution.experiment_dataset import FETCH_RECORD, HubData, read_hub_file
from dj2mgm.errors import InputError, pluralize
from dj2mgm.features.fetch.repositories import CONNECTIONS, HubSource, Repository, RepositoryFile, check_space, look_up
from dj2mgm.servers.hub import hub_errors
from dj2mgm.settings.config_files import list_config_names, suggest_name
from dj2mgm.settings.dataset_files import HubArchive, HubBenchmark
from dj2mgm.settings.string_formats import has_format
from dj2mgm.storage.files import read_json, replace_file, write_bytes, write_json, write_json_list, write_jsonl
from dj2mgm.storage.image_files import IMAGE_SUFFIXES

ROWS_AT_ONCE = 64  # rows that are read or copied together
INSTRUCTION = "Answer the question using a single word or phrase."  # LLaVA's
MMBENCH_COLUMNS = {  # columns of the table, by column of the parquet files
    "index": "index",
    "question": "question",
    "hint": "hint",
    "A": "A",
    "B": "B",
    "C": "C",
    "D": "D",
    "answer": "answer",
    "category": "category",
    "image": "image",
    "source": "source",
    "L2-category": "l2-category",
    "comment": "comment",
    "split": "split",
}


@dataclass(frozen=True)
class BenchmarkWriter:
    """Files of a benchmark.

    Attributes:
        write: function that converts parquet files into a folder.
        files: the files' names in this folder by key of `benchmarks.<name>`.
    """

    write: Callable[[list[Path], Path], None]
    files: dict[str, str]


def write_textvqa(files: list[Path], folder: Path) -> None:
    """Write LLaVA's questions with OCR tokens, TextVQA's answers, and each image once."""
    images: dict[str, str] = {}
    questions, answers = [], []
    for row in _read_rows(files):
        name = str(row["image_id"])
        if not has_format("name", name):
            raise InputError(f"{files[0].parent}: {name!r} is not the id of an image; download the benchmark again")
        if name not in images:
            content = _read_image(row, files)
            images[name] = name + _find_suffix(content, name, files)
            write_bytes(folder / "images" / images[name], content)
        tokens = " ".join(", ".join(row["ocr_tokens"]).split())
        text = f"{row['question'].capitalize()}\nReference OCR token: {tokens}\n{INSTRUCTION}"
        questions.append({"question_id": name, "image": images[name], "text": text})
        answers.append({"image_id": name} | {key: row[key] for key in ("question_id", "question", "answers")})
    write_jsonl(folder / "questions.jsonl", questions)
    write_json(folder / "answers.json", {"data": answers})


def write_mmbench(files: list[Path], folder: Path) -> None:
    """Write MMBench's own table; the cell of a repeated image names the first row with it."""
    first: dict[bytes, str] = {}
    with replace_file(folder / "questions.tsv") as file:
        table = csv.DictWriter(file, MMBENCH_COLUMNS.values(), dialect="excel-tab", lineterminator="\n", restval="")
        table.writeheader()
        for row in _read_rows(files):
            content, number = _read_image(row, files), str(int(row["index"]))
            before = first.setdefault(hashlib.sha256(content).digest(), number)
            image = base64.b64encode(content).decode() if before == number else before
            cells = {ours: row.get(theirs) for theirs, ours in MMBENCH_COLUMNS.items()}
            cells |= {"index": number, "image": image}
            table.writerow({name: "" if cell is None else str(cell) for name, cell in cells.items()})


WRITERS = {
    "textvqa": BenchmarkWriter(
        write_textvqa, {"questions": "questions.jsonl", "answers": "answers.json", "images": "images"}
    ),
    "mmbench": BenchmarkWriter(write_mmbench, {"questions": "questions.tsv"}),
}


def _read_rows(files: list[Path]) -> Iterator[dict]:
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{file} is damaged or not a parquet file ({error}); download it again") from None


def _find_suffix(content: bytes, name: str, files: list[Path]) -> str:
    try:
        return detect_suffix(content)
    except BadImageError as error:
        raise InputError(f"{files[0].parent}: image {name} cannot be opened ({error}); download it again") from None


def _read_image(row: dict, files: list[Path]) -> bytes:
    content = row["image"].get("bytes") if isinstance(row.get("image"), dict) else None
    if not isinstance(content, bytes):
        raise InputError(f"{files[0].parent}: a row has no image; download the benchmark again")
    return content


PARQUET_ROWS, ARCHIVE_ROWS = "rows.parquet", "rows.json"  # files in a dataset's folder
TAIL_BYTES = 2**18  # bytes of a request for the end of a file
LOCAL_HEADER = struct.Struct("<26xHH")  # precedes a file in a zip file; lengths of its name and extra field
EXTRA_FIELD_BYTES = 256  # bytes of an extra field that are requested with the file
MAX_IMAGE_BYTES = 2**26
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class KnownDownload:
    """A dataset or benchmark to download.

    Attributes:
        rows: number of rows; None for all.
        repository: its repository, with the files that are downloaded whole.
        archive: zip file from which some images are read.
    """

    data: HubData
    rows: int | None
    repository: Repository
    archive: RepoSibling | None = None

    def describe(self) -> str:
        """Return a line about license, size and target folder."""
        if not self.archive:
            return self.repository.describe()
        number = "all" if self.rows is None else self.rows
        return (
            f"{self.repository.describe()}, and the images of {pluralize(number, 'row')} from {self.archive.rfilename} "
            f"({self.archive.size / 1e9:.1f} GB as a whole) to {self.data.folder}"
        )


def find_hub_benchmark(name: str) -> HubData:
    """Return a known benchmark of the hub.

    Raises:
        InputError: there is none of this name.
    """
    files = {file_name: read_hub_file(file_name) for file_name in list_config_names("hub")}
    benchmarks = [file_name for file_name, file in files.items() if isinstance(file, HubBenchmark)]
    if name not in benchmarks:
        raise InputError(f"fetch.benchmarks: {name} is unknown; {suggest_name(name, benchmarks)}")
    return HubData(name, files[name])


def needs_download(data: HubData, rows: int | None) -> bool:
    """Return whether a dataset or benchmark must be downloaded to have this number of rows."""
    if not data.is_fetched:
        return True
    return not isinstance(data.file, HubBenchmark) and read_json(data.folder / FETCH_RECORD)["rows"] != rows


def list_fetched_files(data: HubData) -> list[str]:
    """Return the names of the files in the folder of fetched data; `*/` stands for folders of images."""
    if isinstance(data.file, HubBenchmark):
        return [*WRITERS[data.file.benchmark].files.values(), FETCH_RECORD]
    return [*((ARCHIVE_ROWS, "*/") if isinstance(data.file, HubArchive) else (PARQUET_ROWS,)), FETCH_RECORD]


def list_patterns(data: HubData) -> tuple[str, ...]:
    """Return the patterns of the names of a dataset's or benchmark's files on the hub."""
    file = data.file
    patterns = (file.rows, file.images) if isinstance(file, HubArchive) else (file.files,)
    return tuple(f"{data.subset}/{pattern}" for pattern in patterns) if data.subset else patterns


def look_up_data(data: HubData, rows: int | None) -> KnownDownload:
    """Ask the hub about a dataset or benchmark.

    Raises:
        InputError: the hub does not show it, or its files have other names than config/hub states.
    """
    file, patterns = data.file, list_patterns(data)
    copied_to = None if isinstance(file, HubArchive) else str(data.folder)
    source = HubSource(file.hub_id, "dataset", patterns, is_selection=True, license=file.license, copied_to=copied_to)
    repository = look_up(source)
    names = [sibling.rfilename for sibling in repository.files]
    if missing := next((pattern for pattern in patterns if not fnmatch.filter(names, pattern)), None):
        raise InputError(f"{file.hub_id} has no file {missing}; correct config/hub/{data.name}.yaml")
    if isinstance(file, HubArchive):
        archive = next(sibling for sibling in repository.files if sibling.rfilename == file.images)
        repository = replace(repository, files=tuple(sibling for sibling in repository.files if sibling is not archive))
        return KnownDownload(data, rows, repository, archive)
    if rows is not None and not isinstance(file, HubBenchmark):
        repository = replace(repository, files=tuple(_select_files(repository, rows)))
    return KnownDownload(data, rows, repository)


def _select_files(repository: Repository, rows: int) -> Iterator[RepoSibling]:
    """Yield the first parquet files that together have `rows` rows. Only the ends of the files are read."""
    row_count = 0
    for file in sorted(repository.files, key=lambda file: file.rfilename):
        if row_count < rows:
            yield file
            with hub_errors(repository.source.request):
                row_count += pq.read_metadata(_RemoteFile(repository, file).buffer()).num_rows


class _RemoteFile(io.RawIOBase):
    """A file on the hub that is read in ranges."""

    def __init__(self, repository: Repository, file: RepoSibling):
        super().__init__()
        self._file = RepositoryFile(repository.source.hub_id, repository.source.kind, repository.revision, file)
        self._size, self._position = file.size, 0

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes of a range, which may be cut off at the end of the file."""
        return b"".join(self._file.read(start, end))

    def buffer(self) -> io.BufferedReader:
        """Return the file with a buffer, so that small reads near its end are one request."""
        return io.BufferedReader(self, TAIL_BYTES)

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, target: memoryview) -> int:
        content = self.read_range(self._position, self._position + len(target))
        target[: len(content)] = content
        self._position += len(content)
        return len(content)


def convert_data(download: KnownDownload, snapshot: Path) -> None:
    """Write the data in the form that the workflow reads.

    Args:
        download: the data.
        snapshot: folder of the downloaded files.
    """
    data, repository = download.data, download.repository
    files = sorted(snapshot / file.rfilename for file in repository.files)
    data.folder.mkdir(parents=True, exist_ok=True)
    (data.folder / FETCH_RECORD).unlink(missing_ok=True)
    if isinstance(data.file, HubBenchmark):
        WRITERS[data.file.benchmark].write(files, data.folder)
    else:
        if download.archive:
            number = _write_archived(download, download.archive, files[0])
        else:
            number = _write_parquet(files, download.rows, data.folder / PARQUET_ROWS)
        if download.rows is not None and number < download.rows:
            print(f"{data.file.hub_id} has only {number} of the {download.rows} requested rows", flush=True)
    write_json(
        data.folder / FETCH_RECORD, {"hub_id": data.file.hub_id, "revision": repository.revision, "rows": download.rows}
    )


def _write_parquet(files: list[Path], rows: int | None, target: Path) -> int:
    """Write the first rows of several parquet files with the columns of the first file; return the number of rows."""
    row_count = 0
    with pq.ParquetFile(files[0]) as first, replace_file(target, "wb") as output:
        schema = first.schema_arrow
        with pq.ParquetWriter(output, schema) as writer:
            for file in files:
                for batch in _read_batches(file, schema):
                    batch = batch if rows is None else batch.slice(0, rows - row_count)
                    row_count += len(batch)
                    if len(batch):
                        writer.write_batch(batch)
    return row_count


def _read_batches(file: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a parquet file with the columns and types of a schema.

    Raises:
        InputError: the file is damaged, lacks a column, or a column has values that do not fit the type.
    """
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                yield batch if batch.schema.equals(schema) else batch.select(schema.names).cast(schema)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{file} cannot be joined to the dataset's first part ({error}); choose another dataset"
        ) from None


def _write_archived(download: KnownDownload, archive: RepoSibling, rows: Path) -> int:
    """Write LLaVA's first rows, and their images from a zip file on the hub; return the number of rows."""
    repository, folder, request = download.repository, download.data.folder, download.repository.source.request
    print(f"reading the table of contents of {archive.rfilename}", flush=True)
    with hub_errors(request):
        content = _RemoteFile(repository, archive)
        try:
            entries = {entry.filename: entry for entry in zipfile.ZipFile(content.buffer()).infolist()}
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise InputError(f"{repository.source.hub_id}: {archive.rfilename} is not a zip file ({error})") from None
    selected_rows = list(islice(read_llava(rows, number_ids=True), download.rows))
    images = {row["image"]: entries.get(row["image"]) for row in selected_rows if isinstance(row.get("image"), str)}
    for image, entry in images.items():
        _check_entry(f"{repository.source.hub_id}: {image}", image, entry, archive.size)
    size = sum(entry.compress_size for entry in images.values())
    print(f"{len(images)} images: {size / 1e9:.2f} GB", flush=True)
    check_space([(folder, size)])

    def fetch(item: tuple[str, zipfile.ZipInfo]) -> None:
        image, entry = item
        path = folder / image
        if path.is_file() and zlib.crc32(path.read_bytes()) == entry.CRC:
            return
        with hub_errors(request):
            image_bytes = _read_entry(content.read_range, entry)
        write_bytes(path, image_bytes)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for _ in pool.map(fetch, images.items()):
            pass
    write_json_list(folder / ARCHIVE_ROWS, selected_rows)
    return len(selected_rows)


def _check_entry(location: str, image: str, entry: zipfile.ZipInfo | None, archive_size: int) -> None:
    """Raise InputError for an image that is not in the zip file, or whose path, offset or size is impossible."""
    path = PurePosixPath(image)
    if path.is_absolute() or ".." in path.parts or "\\" in image or path.suffix.lower() not in IMAGE_SUFFIXES:
        raise InputError(f"{location} is not a path of an image; the dataset cannot be used")
    if entry is None:
        raise InputError(f"{location} is not in the zip file; the dataset cannot be used")
    if (
        max(entry.file_size, entry.compress_size) > MAX_IMAGE_BYTES
        or entry.compress_type not in ZIP_METHODS
        or entry.flag_bits & 1
    ):
        raise InputError(f"{location} is larger than {MAX_IMAGE_BYTES >> 20} MiB, or compressed in an unknown way")
    if not 0 <= entry.header_offset < archive_size:
        raise InputError(f"{location} lies outside of the zip file; the dataset cannot be used")


def _read_entry(read_range: Callable[[int, int], bytes], entry: zipfile.ZipInfo) -> bytes:
    """Return the content of a file in a zip file, whose bytes `read_range(start, end)` returns.

    Raises:
        ValueError: the content is damaged, or differs from the zip file's checksum.
    """
    start, before = entry.header_offset, LOCAL_HEADER.size + len(entry.filename.encode()) + EXTRA_FIELD_BYTES
    content = read_range(start, start + before + entry.compress_size)
    if len(content) < LOCAL_HEADER.size:
        raise ValueError(f"{entry.filename} is cut off")
    name, further = LOCAL_HEADER.unpack_from(content)
    begin = LOCAL_HEADER.size + name + further
    if begin > before:
        content, begin = read_range(start + begin, start + begin + entry.compress_size), 0
    packed = content[begin : begin + entry.compress_size]
    if entry.compress_type == zipfile.ZIP_DEFLATED:
        try:
            packed = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, entry.file_size or 1)  # 0: no limit
        except zlib.error as error:
            raise ValueError(f"{entry.filename} is damaged ({error})") from None
    if zlib.crc32(packed) != entry.CRC:
        raise ValueError(f"{entry.filename} differs from its checksum")
    return packed
