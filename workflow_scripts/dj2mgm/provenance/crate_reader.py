"""Reader of an untrusted crate as data; nothing in it runs.

Files are read one by one from the zip file or the folder, without unpacking. Names that leave the crate, links, files
that the metadata does not list, wrong digests and excessive sizes are refused.
"""

import hashlib
import io
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from dj2mgm.errors import InputError, quote_value
from dj2mgm.provenance.crate_files import check_config_sizes, is_config
from dj2mgm.records.crate_records import CrateRecord
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import can_be_path
from dj2mgm.storage.plain_files import open_plain

METADATA, RECORD = "ro-crate-metadata.json", "run.json"
PREVIEW_FILES = ("ro-crate-preview.html", "ro-crate-preview_files/")  # tools may add it for readers
MAX_FILES, MAX_BYTES = 20_000, 1 << 30  # limits of a crate
MAX_FILE_BYTES = 64 << 20
MAX_JSON_BYTES = 48 << 20  # bytes of metadata and record, which are parsed; each input takes about 400
MAX_CONFIG_BYTES = 1 << 20  # bytes of a file in config/, which is parsed
MAX_DIRECTORY_BYTES = 8 << 20  # bytes of a zip file's directory, which zipfile reads at once
MAX_NAME_LENGTH = 1000  # characters
# compression methods that Python unpacks in pieces, independently of the stated size
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
PIECE_BYTES = 1 << 20  # bytes
COPY_REMEDY = "use an unchanged copy"
Read = Callable[[str], bytes]


@dataclass(frozen=True)
class Crate:
    """Crate whose files have been compared with their digests."""

    path: Path
    record: CrateRecord
    digests: dict[str, str]  # digests of its files by name, which have been checked
    identity: str  # digest of its metadata, which includes the digests of all files
    content: Read  # function that reads a file's current content

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        if name not in self.digests:
            raise InputError(f"crate: {self.path} holds no {name}; {COPY_REMEDY}")
        return _read_unchanged(self.path, name, self.digests[name], self.content)

    def select_digests(self, *folders: str) -> dict[str, str]:
        """Return the digests of the files with these names or in these folders."""
        return {
            name: digest
            for name, digest in self.digests.items()
            if any(name == folder or name.startswith(f"{folder}/") for folder in folders)
        }


@contextmanager
def open_crate(path: Path) -> Iterator[Crate]:
    """Open a crate, a zip file or a folder with the same files, and check that it is unchanged and complete."""
    with ExitStack() as stack:
        with _readable(path):
            is_folder = path.is_dir()
            if not is_folder and not path.is_file():
                raise InputError(
                    f"crate: {path} is neither a zip file nor a folder; name one that `snakemake crate` wrote"
                )
            sizes, content = _open_folder(path) if is_folder else _open_zip(path, stack)
        yield _check(path, sizes, content)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors that a damaged or changed crate causes into an `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"crate: {quote_value(str(path))} cannot be read ({error.strerror or error}); {COPY_REMEDY}"
        ) from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        raise InputError(f"crate: {path} is not a readable zip file ({error}); {COPY_REMEDY}") from None


def _open_zip(path: Path, stack: ExitStack) -> tuple[dict[str, int], Read]:
    archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(_ZipBytes(path))))

    def read(name: str) -> bytes:
        """Return a file without holding more in memory than the checked size and one piece."""
        with _readable(path), archive.open(name) as file:
            return b"".join(iter(lambda: file.read(PIECE_BYTES), b""))

    return _read_sizes(path, archive), read


def _open_folder(path: Path) -> tuple[dict[str, int], Read]:
    sizes = _list_sizes(path)

    def read(name: str) -> bytes:
        with _readable(path), open_plain(path / name, path, None) as file:
            return file.read(sizes[name] + 1)  # a growing file then has another digest

    return sizes, read


class _ZipBytes(io.FileIO):
    """Bytes of a zip file; a read is limited to the largest directory."""

    def read(self, size: int | None = -1, /) -> bytes:
        limit = MAX_DIRECTORY_BYTES + 1
        content = super().read(limit if size is None or size < 0 else min(size, limit))
        if len(content) == limit:
            raise zipfile.BadZipFile("its list of files is longer than that of any crate")
        return content


def _read_sizes(path: Path, archive: zipfile.ZipFile) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in archive.infolist()[: MAX_FILES + 1]:
        if info.is_dir():
            continue
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG) or info.flag_bits & 1 or info.filename in sizes:
            raise InputError(
                f"crate: {path}: {quote_value(info.filename)} is a link, encrypted or repeated; {COPY_REMEDY}"
            )
        if info.compress_type not in COMPRESSIONS:
            raise InputError(f"crate: {path}: {quote_value(info.filename)} has an unknown compression; {COPY_REMEDY}")
        sizes[info.filename] = info.file_size
    return sizes


def _list_sizes(path: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            file = Path(folder, name)
            status = file.lstat()
            if not stat.S_ISDIR(status.st_mode):
                if not stat.S_ISREG(status.st_mode):
                    raise InputError(f"crate: {file} is a link or not a file; {COPY_REMEDY}")
                sizes[file.relative_to(path).as_posix()] = status.st_size
        if len(sizes) > MAX_FILES:
            break
    return sizes


def _check(path: Path, sizes: dict[str, int], read: Read) -> Crate:
    """Return the crate; raise InputError unless it has only the listed files with their digests and allowed sizes."""
    if METADATA not in sizes:
        raise InputError(f"crate: {path} has no {METADATA}; name a crate that `snakemake crate` wrote")
    if len(sizes) > MAX_FILES or sum(sizes.values()) > MAX_BYTES or max(sizes.values()) > MAX_FILE_BYTES:
        raise InputError(f"crate: {path} holds more or larger files than a crate of this workflow; {COPY_REMEDY}")
    for name, size in sizes.items():
        _check_name(path, name)
        if name in (METADATA, RECORD) and size > MAX_JSON_BYTES:
            raise InputError(f"crate: {path}: {name} is larger than {MAX_JSON_BYTES} bytes; {COPY_REMEDY}")
        if name.startswith("config/") and size > MAX_CONFIG_BYTES:
            raise InputError(f"crate: {path}: {name!r} is larger than a configuration may be, {MAX_CONFIG_BYTES} bytes")
    check_config_sizes([size for name, size in sizes.items() if is_config(name)], f"{path}: config/", COPY_REMEDY)
    metadata = read(METADATA)
    digests = _read_digests(path, metadata)
    for name in sorted(sizes.keys() - digests.keys() - {METADATA}):
        if not name.startswith(PREVIEW_FILES):
            raise InputError(f"crate: {path} contains {name!r}, which its metadata does not list; {COPY_REMEDY}")
    if missing := sorted(digests.keys() - sizes.keys()):
        raise InputError(f"crate: {path} lacks {quote_value(missing[0])}, which its metadata lists; {COPY_REMEDY}")
    if RECORD not in digests:
        raise InputError(f"crate: {path} has no {RECORD}; name a crate that `snakemake crate` wrote")
    for name, digest in digests.items():
        _read_unchanged(path, name, digest, read)
    values = _parse(path, RECORD, _read_unchanged(path, RECORD, digests[RECORD], read))
    record = validate_settings(CrateRecord, values, f"{path}: {RECORD}")
    return Crate(path, record, digests, hashlib.sha256(metadata).hexdigest(), read)


def _read_unchanged(path: Path, name: str, digest: str, read: Read) -> bytes:
    """Return the content of a file if it has this digest."""
    content = read(name)
    if hashlib.sha256(content).hexdigest() != digest:
        raise InputError(f"crate: {path}: {name!r} has changed since the crate was written; {COPY_REMEDY}")
    return content


def _check_name(path: Path, name: str) -> None:
    """Raise InputError for a name that would be outside of an unpacked folder on any system."""
    parts = name.split("/")
    is_plain = len(name) <= MAX_NAME_LENGTH and name.isprintable() and can_be_path(name)
    if not is_plain or "\\" in name or ":" in parts[0] or {"", ".", ".."} & set(parts):
        raise InputError(f"crate: {path}: {quote_value(name)} is not a valid file name in a crate; {COPY_REMEDY}")


def _read_digests(path: Path, content: bytes) -> dict[str, str]:
    """Return the digests of the crate's files; files elsewhere have an address as name."""
    digests: dict[str, str] = {}
    graph = _parse(path, METADATA, content).get("@graph")
    for entity in graph if isinstance(graph, list) else ():
        uri, digest = (entity.get(key) for key in ("@id", "sha256")) if isinstance(entity, dict) else (None, None)
        if isinstance(uri, str) and isinstance(digest, str) and not uri.startswith(("#", "file:", "http")):
            digests[unquote(uri)] = digest
    return digests


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _parse(path: Path, name: str, content: bytes) -> dict:
    try:
        values = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"crate: {path}: {name} is not JSON ({type(error).__name__}); {COPY_REMEDY}") from None
    if not isinstance(values, dict):
        raise InputError(f"crate: {path}: {name} must be an object; {COPY_REMEDY}")
    return values
