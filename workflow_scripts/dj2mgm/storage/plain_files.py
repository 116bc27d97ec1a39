"""Functions that open and copy untrusted files only if they are regular files of limited size inside their folder.

An untrusted folder may contain links to the user's own files, which a copy would publish, and pipes or devices, which
block a reader forever.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dj2mgm.errors import InputError

MIB = 1 << 20
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # folders of a repository in the Hugging Face cache
SHARED_BLOBS = ".huggingface-shared-blobs"  # file in the folder of blobs that all repositories of a cache share
COPY_REMEDY = "put a copy of the file there"


def check_tree(folder: Path) -> None:
    """Check that a folder contains only regular files and folders."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise InputError(f"{path} is not a regular file but {_name_kind(mode)}; {COPY_REMEDY}, or delete it")


def list_homes(folder: Path) -> list[Path]:
    """Return the real folders in which the files of a folder may be: itself and, in the hub's cache, the blobs.

    Blobs of a repository may be links to blobs that all repositories of the cache share.
    """
    home = folder.resolve()
    repositories = [candidate.parents[1] for candidate in (home, *home.parents) if candidate.parent.name == SNAPSHOTS]
    shared = [
        repository.parent / BLOBS for repository in repositories if (repository.parent / BLOBS / SHARED_BLOBS).is_file()
    ]
    return [home, *(repository / BLOBS for repository in repositories), *shared]


def resolve_inside(path: Path, folder: Path) -> Path:
    """Resolve a path that must lead to a file in `folder`.

    In a snapshot of the Hugging Face cache, files may be links to the blobs of the same repository or the shared ones.
    """
    homes = list_homes(folder)
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        raise InputError(f"{path} cannot be read ({error}); {COPY_REMEDY}, or delete it") from None
    if not any(target.is_relative_to(home) for home in homes):
        raise InputError(f"{path} is a link out of its folder, to {target}; {COPY_REMEDY}, or delete it")
    return target


def check_plain(path: Path, folder: Path, most_bytes: int | None) -> None:
    """Check a file of an untrusted folder without opening it: it must be a regular file inside the folder.

    `most_bytes` is the size limit of a text file, which must not be a hard link; None for weights.
    """
    _check_status(path, resolve_inside(path, folder).lstat(), most_bytes)


@contextmanager
def open_plain(path: Path, folder: Path, most_bytes: int | None) -> Iterator[IO[bytes]]:
    """Open a file of an untrusted folder for reading; for arguments and errors see `check_plain`."""
    # does not wait for the writer of a pipe, and does not follow a link created after the check
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(resolve_inside(path, folder), flags)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {COPY_REMEDY}") from None
    try:
        _check_status(path, os.fstat(descriptor), most_bytes)
    except InputError:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def copy_plain(path: Path, folder: Path, target: Path, most_bytes: int | None = None) -> None:
    """Copy a file of an untrusted folder to `target`; for errors see `check_plain`."""
    with open_plain(path, folder, most_bytes) as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy)


def _check_status(path: Path, status: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file but {_name_kind(status.st_mode)}; {COPY_REMEDY}, or delete it")
    if most_bytes is None:
        return
    if status.st_nlink > 1:
        raise InputError(f"{path} is a hard link, so it may be a file outside of the folder; {COPY_REMEDY}")
    if status.st_size > most_bytes:
        raise InputError(f"{path} has {status.st_size} bytes, but may have at most {most_bytes}; replace it")


def _name_kind(mode: int) -> str:
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISDIR: "a folder"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")


def check_no_null(text: str, location: str | Path) -> str:
    """Return the text; raise InputError if it contains a null character, as UTF-16 without a byte order mark does."""
    if "\0" in text:
        raise InputError(f"{location}: it contains null bytes, as text in UTF-16 does; save the file as UTF-8")
    return text
