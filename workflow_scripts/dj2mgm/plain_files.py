"""Untrusted files: opened and copied only if they are regular files of a bounded size inside their folder.

A folder from somebody else may hold links to the user's own files, which a copy would publish, and pipes or devices, on
which a reader waits forever.
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
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # folders of a repository in the cache of the Hugging Face hub
COPY = "put a copy of the file there"


def check_tree(folder: Path) -> None:
    """Check that a folder holds regular files and folders only.

    Raises:
        InputError: it holds a link, a pipe, a socket or a device.
    """
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise InputError(f"{path} is not a regular file but {_kind(mode)}; {COPY}, or delete it")


def resolve_inside(path: Path, folder: Path) -> Path:
    """Return the file that `path` leads to, which must lie in `folder`.

    In a snapshot of the hub's cache, and in the folders in it, files are links to the blobs of the same repository.

    Raises:
        InputError: it is a link out of the folder, or to nothing.
    """
    home = folder.resolve()
    homes = [home, *(place.parents[1] / BLOBS for place in (home, *home.parents) if place.parent.name == SNAPSHOTS)]
    try:
        found = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise InputError(f"{path} cannot be read ({error}); {COPY}, or delete it") from None
    if not any(found.is_relative_to(home) for home in homes):
        raise InputError(f"{path} is a link out of its folder, to {found}; {COPY}, or delete it")
    return found


def check_plain(path: Path, folder: Path, most_bytes: int | None) -> None:
    """Check a file of an untrusted folder without opening it.

    Args:
        most_bytes: size limit of a text file, which must also have one name only; None for weights.

    Raises:
        InputError: it is not a regular file inside `folder`, or too large.
    """
    _check_status(path, resolve_inside(path, folder).lstat(), most_bytes)


@contextmanager
def open_plain(path: Path, folder: Path, most_bytes: int | None) -> Iterator[IO[bytes]]:
    """Open a file of an untrusted folder for reading; arguments and errors are those of `check_plain`."""
    # without waiting for the writer of a pipe, and without following a link that was put there after the check
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(resolve_inside(path, folder), flags)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {COPY}") from None
    try:
        _check_status(path, os.fstat(descriptor), most_bytes)
    except InputError:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def copy_plain(path: Path, folder: Path, target: Path, most_bytes: int | None = None) -> None:
    """Copy a file of an untrusted folder to `target`; errors are those of `check_plain`."""
    with open_plain(path, folder, most_bytes) as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy)


def _check_status(path: Path, status: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file but {_kind(status.st_mode)}; {COPY}, or delete it")
    if most_bytes is None:
        return
    if status.st_nlink > 1:
        raise InputError(f"{path} is a hard link, so it may be a file from elsewhere; {COPY}")
    if status.st_size > most_bytes:
        raise InputError(f"{path} has {status.st_size} bytes, more than the {most_bytes} of such a file; replace it")


def _kind(mode: int) -> str:
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISDIR: "a folder"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
