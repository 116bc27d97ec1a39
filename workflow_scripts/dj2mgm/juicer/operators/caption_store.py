"""Captions on disk, so that a captioner captions no image twice, with any recipe.

`<folder>/<captioner's fingerprint>/<writer>.jsonl` has one line per image:

    {"image": "<sha256 of the file>", "candidates": ["a red circle"], "log_likelihoods": [-1.2]}

A captioner on a server may add `problem` and `tokens`. If a captioner draws at random, `image` is "<sha256>:<batch>",
since its captions depend on all images of the batch. For an answer to a question about the image, it is "<sha256 of the
file>-<SHA-256 of the question, 32 digits>".

A store reads all files of its fingerprint and appends to its own file only, so that simultaneous runs share captions.
The files may come from someone else, together with results, so their lines are checked and links are not followed.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, ConfigDict, Field

from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError
from dj2mgm.settings.string_formats import MAX_TOKENS
from dj2mgm.storage.plain_files import open_plain
from dj2mgm.storage.streaming import DiskMap

from .declarations import Captions

MAX_LINE_BYTES = 2**24


class _Row(BaseModel):
    """A line of a store."""

    model_config = ConfigDict(strict=True)

    image: str
    candidates: Annotated[list[str], Field(min_length=1)]
    log_likelihoods: list[float] | None
    problem: Annotated[str, Field(pattern="^[a-z ]{1,50}$")] | None = None
    tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None


def has_captions(folder: Path, fingerprint: str) -> bool:
    return any(path.is_file() and path.stat().st_size for path in (folder / fingerprint).glob("*.jsonl"))


class CaptionStore:
    """The captions of one captioner by the image's key, which is the image's SHA-256 or begins with it."""

    def __init__(self, folder: Path | None, fingerprint: str, writer: str, alone: bool = False):
        """Open this process's file and read all files of the captioner.

        Args:
            folder: folder of all captioners' captions (None: captions are kept in this process only).
            writer: name of the file to which new captions are appended. Processes that share a name get one file each.
            alone: whether other processes with the same captioner wait until this store is closed, so that no caption
                is paid for twice.
        """
        self.earlier_counts = (0, 0)  # images, and tokens that their captions have cost, in all files
        self._lines = DiskMap()
        self._file = self._turn = None
        if folder is not None:
            own_folder = folder / fingerprint
            own_folder.mkdir(parents=True, exist_ok=True)
            self._turn = _take_turn(own_folder / "turn") if alone else None
            self._file = _open_own_file(own_folder, writer)
            for path in sorted(own_folder.glob("*.jsonl")):
                self._lines.fill(self._count(_read(path)))

    def _count(self, rows: Iterable[tuple[str, Captions]]) -> Iterator[tuple[str, str]]:
        for image, captions in rows:
            count, tokens = self.earlier_counts
            self.earlier_counts = count + 1, tokens + (captions.tokens or 0)
            yield image, _format_line(image, captions)

    def get(self, images: Iterable[str]) -> dict[str, Captions]:
        """Return the captions of the images that have any."""
        lines = {image: self._lines.get(image) for image in images}
        return {image: _build_captions(json.loads(line)) for image, line in lines.items() if line is not None}

    def add(self, batch: dict[str, Captions]) -> None:
        """Write a batch to disk; it is complete there when this returns."""
        lines = {image: _format_line(image, captions) for image, captions in batch.items()}
        if self._file:
            self._file.write("".join(lines.values()).encode())
            self._file.flush()
        self._lines.fill(lines.items())

    def close(self) -> None:
        for file in filter(None, (self._file, self._turn)):
            file.close()


def _take_turn(path: Path) -> IO[bytes]:
    """Open and lock a file that one process has at a time; the lock ends with the process at the latest."""
    file = _open_regular(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        note(f"waiting for another run that requests the same captions (lock file {path})")
        fcntl.lockf(file, fcntl.LOCK_EX)
    return file


def _open_own_file(folder: Path, writer: str) -> IO[bytes]:
    """Open and lock `<writer>.jsonl`, or a numbered file if another process has locked it; cut off a torn last line."""
    for number in count(1):
        path = folder / f"{writer}{f'-{number}' if number > 1 else ''}.jsonl"
        file = _open_regular(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        _cut_torn_line(file)
        return file


def _open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading and appending, and create it if there is none; links are not followed."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise InputError(f"{path} is a link, folder or pipe. Delete it, or put a copy of the file there")
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "ab+")


def _format_line(image: str, captions: Captions) -> str:
    row = {"image": image, "candidates": captions.candidates, "log_likelihoods": captions.log_likelihoods}
    row |= {key: value for key in ("problem", "tokens") if (value := getattr(captions, key)) is not None}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _build_captions(row: dict) -> Captions:
    return Captions(row["candidates"], row["log_likelihoods"], row.get("problem"), row.get("tokens"))


def _cut_torn_line(file: IO[bytes]) -> None:
    """Cut off an incomplete last line, which a killed writer may have left."""
    file.seek(0)
    file.truncate(sum(len(line) for line in _read_lines(file) if line.endswith(b"\n")))


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines; a line of more than `MAX_LINE_BYTES` bytes, which no store writes, is the last one."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            return


def _read(path: Path) -> Iterator[tuple[str, Captions]]:
    with open_plain(path, path.parent, None) as file:
        for number, line in enumerate(_read_lines(file), start=1):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return  # another process is writing this line
            try:
                row = _Row.model_validate_json(line)
                if row.log_likelihoods is not None and len(row.log_likelihoods) != len(row.candidates):
                    raise ValueError("candidates and log-likelihoods of different numbers")
            except ValueError:
                raise InputError(f"{path}, line {number}: expected a row of captions. Delete the file") from None
            yield row.image, _build_captions(row.model_dump())
