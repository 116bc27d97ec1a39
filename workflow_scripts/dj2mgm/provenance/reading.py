"""Reading a crate that somebody hands over: it is data, and nothing of it runs.

Its files are read one by one, from the zip or the folder, and none is unpacked. A name that leaves the crate, a link, a
file that the metadata does not list, or whose digest is another, and sizes that no crate has are refused.
"""

import hashlib
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from dj2mgm.config.settings.crates import CrateRecord
from dj2mgm.config.settings.validation import validated
from dj2mgm.errors import InputError

METADATA, RECORD = "ro-crate-metadata.json", "run.json"
PREVIEW = ("ro-crate-preview.html", "ro-crate-preview_files/")  # for people; tools may add it
MOST_FILES, MOST_BYTES = 20_000, 1 << 30  # of a crate
LARGEST = 64 << 20  # of its files
LARGEST_CONFIG = 1 << 20  # of its files in config/, which are parsed
KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that Python unpacks piece by piece, whatever a size says
PIECE = 1 << 20  # bytes
AGAIN = "take a copy that nobody has changed"
Read = Callable[[str], bytes]


@dataclass(frozen=True)
class Crate:
    path: Path
    record: dict  # config/settings/crates.py
    digests: dict[str, str]  # of the files that it holds, by name; each has been checked
    identity: str  # digest of its metadata, which has those of all its files
    content: Read  # of a file, as it is now

    def read(self, name: str) -> bytes:
        """
        Raises:
            InputError: the crate has no such file, or another than its metadata says.
        """
        if name not in self.digests:
            raise InputError(f"crate: {self.path} holds no {name}; {AGAIN}")
        content = self.content(name)
        if hashlib.sha256(content).hexdigest() != self.digests[name]:
            raise InputError(f"crate: {self.path}: {name!r} is not what it was when the crate was written; {AGAIN}")
        return content

    def files(self, *folders: str) -> dict[str, str]:
        """Digests of the files that these folders or names stand for."""
        return {
            name: digest
            for name, digest in self.digests.items()
            if any(name == folder or name.startswith(f"{folder}/") for folder in folders)
        }


@contextmanager
def open_crate(path: Path) -> Iterator[Crate]:
    """
    Args:
        path: a zip file, or a folder with the same files.

    Raises:
        InputError: it is no crate of this workflow, was changed, or holds what none holds.
    """
    if path.is_dir():
        yield _checked(path, _listed(path), lambda name: (path / name).read_bytes())
        return
    if not path.is_file():
        raise InputError(f"crate: {path} does not exist; name a crate's zip file or folder")
    try:
        with zipfile.ZipFile(path) as archive:
            yield _checked(path, _members(path, archive), lambda name: _unpacked(archive, name))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise InputError(f"crate: {path} is no zip file that can be read ({error}); {AGAIN}") from None


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in archive.infolist()[: MOST_FILES + 1]:
        if info.is_dir():
            continue
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG) or info.flag_bits & 1 or info.filename in sizes:
            raise InputError(f"crate: {path}: {info.filename!r} is a link, locked, or there twice; {AGAIN}")
        if info.compress_type not in KINDS:
            raise InputError(f"crate: {path}: {info.filename!r} is packed as no crate's files are; {AGAIN}")
        sizes[info.filename] = info.file_size
    return sizes


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file, of which never more is in memory than the size that was checked, and a piece."""
    with archive.open(name) as file:
        return b"".join(iter(lambda: file.read(PIECE), b""))


def _listed(path: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            found = Path(folder, name)
            status = found.lstat()
            if not stat.S_ISDIR(status.st_mode):
                if not stat.S_ISREG(status.st_mode):
                    raise InputError(f"crate: {found} is a link or no file; {AGAIN}")
                sizes[found.relative_to(path).as_posix()] = status.st_size
        if len(sizes) > MOST_FILES:
            break
    return sizes


def _checked(path: Path, sizes: dict[str, int], read: Read) -> Crate:
    if METADATA not in sizes:
        raise InputError(f"crate: {path} holds no {METADATA}; name a crate that `snakemake crate` wrote")
    if len(sizes) > MOST_FILES or sum(sizes.values()) > MOST_BYTES or max(sizes.values()) > LARGEST:
        raise InputError(f"crate: {path} holds more or larger files than a crate of this workflow; {AGAIN}")
    for name, size in sizes.items():
        _check_name(path, name)
        if name.startswith("config/") and size > LARGEST_CONFIG:
            raise InputError(f"crate: {path}: {name!r} is larger than a configuration may be, {LARGEST_CONFIG} bytes")
    metadata = read(METADATA)
    digests = _digests_in(path, metadata)
    for name in sorted(sizes.keys() - digests.keys() - {METADATA}):
        if not name.startswith(PREVIEW):
            raise InputError(f"crate: {path} holds {name!r}, which its metadata does not list; {AGAIN}")
    if missing := sorted(digests.keys() - sizes.keys()):
        raise InputError(f"crate: {path} lacks {missing[0]!r}, which its metadata lists; {AGAIN}")
    if RECORD not in digests:
        raise InputError(f"crate: {path} holds no {RECORD}; name a crate that `snakemake crate` wrote")
    record = _parse(path, RECORD, read(RECORD))
    crate = Crate(path, record, digests, hashlib.sha256(metadata).hexdigest(), read)
    for name in digests:
        crate.read(name)
    validated(CrateRecord, record, f"{path}: {RECORD}")
    return crate


def _check_name(path: Path, name: str) -> None:
    """Refuse what would lie outside of the folder that it is unpacked to, on any system."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or ":" in parts[0] or {"", ".", ".."} & set(parts):
        raise InputError(f"crate: {path}: {name!r} is no name of a file in a crate; {AGAIN}")


def _digests_in(path: Path, content: bytes) -> dict[str, str]:
    """Of the files that a crate holds; those elsewhere are named by an address."""
    digests: dict[str, str] = {}
    graph = _parse(path, METADATA, content).get("@graph")
    for entity in graph if isinstance(graph, list) else ():
        uri, digest = (entity.get(key) for key in ("@id", "sha256")) if isinstance(entity, dict) else (None, None)
        if isinstance(uri, str) and isinstance(digest, str) and not uri.startswith(("#", "file:", "http")):
            digests[unquote(uri)] = digest
    return digests


def _parse(path: Path, name: str, content: bytes) -> dict:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"crate: {path}: {name} is no JSON ({type(error).__name__}); {AGAIN}") from None
    if not isinstance(values, dict):
        raise InputError(f"crate: {path}: {name} must hold an object; {AGAIN}")
    return values
