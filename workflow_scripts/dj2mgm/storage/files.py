"""Writers of complete files, readers of small structured ones, and guards against untrusted files.

Every output of the workflow is written to a temporary file in the same folder and renamed, so that a killed stage never
leaves an incomplete file under the final name.

An untrusted folder may contain links to the user's own files, which a copy would publish, and pipes or devices, which
block a reader forever. So functions open and copy untrusted files only if they are regular files of limited size
inside their folder.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from glob import glob
from pathlib import Path
from typing import IO, Any

import yaml

from dj2mgm.errors import InputError

MIB = 1 << 20
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # folders of a repository in the Hugging Face cache
SHARED_BLOBS = ".huggingface-shared-blobs"  # file in the folder of blobs that all repositories of a cache share
COPY_REMEDY = "put a copy of the file there"
MAKE_AGAIN = "delete it and run the same command again to make a new one"
FIX_FILE_REMEDY = "fix the file"  # for a user's own file
MAX_NESTING = 32  # levels of lists and objects in a configuration
APPLE_DOUBLE = "._"  # prefix of the files that macOS adds on other file systems; they hold no content
MAX_DEPTHS = 2  # most `**` in a file pattern
UMASK = os.umask(0)  # can only be read by setting it
# Temporary files and folders have unpredictable names, so that no link can wait in their place. A lock shows that their
# process is alive; unlocked ones were left by a killed process, and the next writer in the folder removes them.
TEMPORARY, FOLDER = ".dj2mgm.tmp", ".d"


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


os.umask(UMASK)


def _open_to_others(file: Path) -> None:
    """Give a file the user's default permissions; safetensors creates files that only the owner can read."""
    file.chmod(0o666 & ~UMASK)


@contextmanager
def _temporary_neighbor(path: Path) -> Iterator[Path]:
    """Create an empty, locked temporary file in the folder of `path`, yield its name, and remove it at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    descriptor = None
    while descriptor is None:
        descriptor, name = tempfile.mkstemp(TEMPORARY, f".{path.name}.", path.parent)
        # Another process may have removed it as a leftover.
        if not _lock(descriptor, or_else=True) or os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            descriptor = None
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(descriptor)


@cache
def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders of dead processes, once per process."""
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(".") and entry.name.endswith(TEMPORARY) and entry.is_file(follow_symlinks=False):
            try:
                descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:  # already removed, or another user's
                continue
            if _lock(descriptor, or_else=False):
                shutil.rmtree(entry.path + FOLDER, ignore_errors=True)
                Path(entry.path).unlink(missing_ok=True)
            os.close(descriptor)


def _lock(descriptor: int, or_else: bool) -> bool:
    """Lock a file and return whether it worked, or `or_else` if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return or_else
    return True


@contextmanager
def replace_file(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file for writing, and rename it to `path` only if the block succeeds."""
    path = Path(path)
    with _temporary_neighbor(path) as temporary:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _open_to_others(temporary)
        os.replace(temporary, path)


def write_text(path: str | Path, text: str) -> None:
    with replace_file(path) as file:
        file.write(text)


def write_bytes(path: str | Path, content: bytes) -> None:
    with replace_file(path, "wb") as file:
        file.write(content)


def write_json(path: str | Path, value: Any) -> None:
    with replace_file(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False, default=asdict)
        file.write("\n")


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> int:
    """Write one JSON object per line; return the number of rows."""
    count = 0
    with replace_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def write_json_list(path: str | Path, rows: Iterable[dict]) -> int:
    """Write one JSON list with one row per line; return the number of rows."""
    count = 0
    with replace_file(path) as file:
        for row in rows:
            file.write((",\n" if count else "[\n") + json.dumps(row, ensure_ascii=False))
            count += 1
        file.write("\n]\n" if count else "[]\n")
    return count


def write_yaml(path: str | Path, value: Any) -> None:
    with replace_file(path) as file:
        file.write(format_yaml(value))


def format_yaml(value: Any) -> str:
    """Return a value as YAML, in the format of all settings files."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def format_yaml_line(value: Any) -> str:
    """Return a value as YAML on one line, for a command or message."""
    return yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    ).strip()


@contextmanager
def readable(location: str | Path, *errors: type[Exception], remedy: str = MAKE_AGAIN) -> Iterator[None]:
    """Turn errors that only a damaged results file can cause into an `InputError`.

    Args:
        location: the file, optionally with a line, for the message.
        errors: further errors, in addition to those of undecodable text and JSON.
        remedy: remedy for the message.
    """
    try:
        yield
    except (ValueError, RecursionError, *errors) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{location} is damaged ({reason}): {remedy}") from None


def read_json(path: str | Path, expected_type: type = dict, remedy: str = MAKE_AGAIN) -> Any:
    """Read a JSON file with an object, or with a value of type `expected_type`.

    Raises:
        InputError: the content is something else. A missing key of an object raises it later, on access.
    """
    with open(path, encoding="utf-8") as file, readable(path, remedy=remedy):
        return _require_type(
            expected_type, json.load(file, object_hook=lambda values: _make_record(values, path, remedy))
        )


def read_jsonl(path: str | Path, may_be_empty: bool = True) -> Iterator[dict]:
    """Yield the rows of a jsonl file that this workflow wrote, unchecked; user files are read by `data.formats`.

    Raises:
        InputError: a line is not one JSON object, or the file is empty but must not be.
    """
    if not may_be_empty and Path(path).stat().st_size == 0:
        raise InputError(f"{path} is damaged (it is empty): {MAKE_AGAIN}")
    with open(path, "rb") as file:  # as bytes, because only \n ends a line, and a byte order mark must be removed
        for number, line in enumerate(file, start=1):
            with readable(f"{path}, line {number},"):
                row = _require_type(dict, json.loads(line.decode("utf-8-sig")))
            yield row  # outside of `readable`, because errors of the caller have other reasons


def read_yaml(path: str | Path) -> dict:
    """Read a YAML file of keys and values."""
    with open(path, encoding="utf-8") as file, readable(path, yaml.YAMLError):
        return _require_type(dict, yaml.safe_load(file))


def read_if_whole(path: Path) -> dict:
    """Read a mapping from a JSON or YAML file; return {} if it is missing or damaged: its stage reports it."""
    try:
        values = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except (OSError, InputError):
        return {}
    return values if isinstance(values, dict) else {}


class _Record(dict):
    """Object of a results file; a missing key raises InputError."""

    location: str | Path
    remedy: str

    def __missing__(self, key: str) -> None:
        raise InputError(f"{self.location} is damaged (it lacks {key!r}): {self.remedy}")


def _make_record(values: dict, location: str | Path, remedy: str) -> _Record:
    record = _Record(values)
    record.location, record.remedy = location, remedy
    return record


def _require_type(expected_type: type, value: Any) -> Any:
    if not isinstance(value, expected_type):
        names = {dict: "an object", list: "a list"}
        raise ValueError(f"expected {names[expected_type]}, found {json.dumps(value, default=str)[:40]}")
    return value


def compute_sha256(*paths: str | Path) -> str:
    """Return the SHA-256 of the concatenated contents of the files."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def can_be_path(text: str) -> bool:
    """Return whether a text is a valid path: UTF-8 without NUL, names of up to 255 bytes, at most 4095 bytes."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return b"\0" not in encoded and len(encoded) < 4096 and all(len(name) <= 255 for name in encoded.split(b"/"))


def discard_files(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder, as far as they exist."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def find_files(path: str | Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the file, the files below the folder with one of the suffixes, or the files that match the pattern.

    The files `._*` that macOS adds to a folder are left out.
    """
    path = Path(path)
    if path.is_dir():
        visible_files = (file for file in list_files(path) if not file.name.startswith(APPLE_DOUBLE))
        files = [file for file in visible_files if file.suffix.lower() in suffixes]
    elif path.is_file():
        files = [path]
    else:
        pattern = re.sub(r"(\*\*/)+", "**/", str(path))
        if pattern.count("**") > MAX_DEPTHS:  # each `**` multiplies the number of visited folders
            raise InputError(f"{path}: a pattern may contain ** at most {MAX_DEPTHS} times; name a folder instead")
        matches = map(Path, glob(pattern, recursive=True))
        files = sorted(file for file in matches if not _is_circular(file.absolute().parent))
    unusual_files = [file for file in files if not file.is_file() and not file.is_dir()]
    if broken_link := next((file for file in unusual_files if not file.exists()), None):
        raise InputError(f"{broken_link} is a broken link; delete it, or restore its target")
    if unusual_files:
        raise InputError(
            f"{unusual_files[0]} is a pipe, a socket or a device; put a copy of its content there, or delete it"
        )
    return files


def list_files(folder: str | Path) -> list[Path]:
    """Return all files below a folder, sorted; skip links to folders inside, as their files are listed anyway."""
    root, files = os.path.realpath(folder), []
    for parent, folder_names, file_names in os.walk(folder):
        for link in (os.path.join(parent, name) for name in folder_names):
            if os.path.islink(link) and os.path.commonpath([root, os.path.realpath(link)]) != root:
                raise InputError(
                    f"{link} is a link to a folder outside of {folder}, which is not read; name its target, replace "
                    "the link by a copy, or delete it"
                )
        files += [Path(parent, name) for name in file_names]
    return sorted(files, key=lambda file: file.parts)  # the same order as that of paths, four times as fast


@cache
def _is_circular(folder: Path) -> bool:
    """Return whether a link in the path leads back to a parent folder: a shorter path also reaches its files."""
    parents = folder.parents
    leads_back = folder.is_symlink() and os.path.realpath(folder) in map(os.path.realpath, parents)
    return leads_back or (bool(parents) and _is_circular(folder.parent))


@contextmanager
def replace_folder(folder: str | Path) -> Iterator[Path]:
    """Fill a temporary folder, and move it to `folder` only if the block succeeds."""
    folder = Path(folder)
    with _temporary_neighbor(folder) as lock:
        temporary = Path(f"{lock}{FOLDER}")
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.rglob("*.safetensors"):
                _open_to_others(file)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
