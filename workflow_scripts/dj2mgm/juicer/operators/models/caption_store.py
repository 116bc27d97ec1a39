"""Captions on disk, so that no image is captioned twice by the same captioner, whatever recipe asks.

`<folder>/<captioner's fingerprint>/<writer>.jsonl` holds one image a line:

    {"image": "<sha256 of the file>", "candidates": ["a red circle"], "log_likelihoods": [-1.2]}

and of a captioner that asks a server, perhaps `problem` and `tokens`; of one that draws at random, `image` is
"<sha256>:<batch>", as its captions follow from all images of a batch.

All files of a fingerprint are read, each is appended to by one process only, so that runs may share captions while they
run at the same time.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO

from dj2mgm.errors import InputError
from dj2mgm.messages import note
from dj2mgm.streaming import DiskMap

from .captioner import Captions


def has_captions(folder: Path, fingerprint: str) -> bool:
    return any(path.stat().st_size for path in (folder / fingerprint).glob("*.jsonl"))


class CaptionStore:
    """The captions of one captioner by their image's key, which is its SHA-256 or begins with it.

    Args:
        folder: of all captioners' captions; None: captions are kept for this process only.
        writer: name of the file that new captions are appended to; processes that share it get one each.
        alone: other processes with the same captioner wait until this store is closed: captions cost something, and
            none is to be asked for twice.
    """

    def __init__(self, folder: Path | None, fingerprint: str, writer: str, alone: bool = False):
        self.before = (0, 0)  # images, and tokens that their captions have cost, in all files
        self._lines = DiskMap()
        self._file = self._turn = None
        if folder is not None:
            own = folder / fingerprint
            own.mkdir(parents=True, exist_ok=True)
            self._turn = _take_turn(own / "turn") if alone else None
            self._file = _own_file(own, writer)
            for path in sorted(own.glob("*.jsonl")):
                self._lines.fill(self._count(_read(path)))

    def _count(self, rows: Iterable[tuple[str, Captions]]) -> Iterator[tuple[str, str]]:
        for image, captions in rows:
            count, tokens = self.before
            self.before = count + 1, tokens + (captions.tokens or 0)
            yield image, _line(image, captions)

    def get(self, images: Iterable[str]) -> dict[str, Captions]:
        """Captions of those images that have some."""
        lines = {image: self._lines.get(image) for image in images}
        return {image: _captions(json.loads(line)) for image, line in lines.items() if line is not None}

    def add(self, batch: dict[str, Captions]) -> None:
        """Keep a batch; it is on disk, whole, when this returns."""
        lines = {image: _line(image, captions) for image, captions in batch.items()}
        if self._file:
            self._file.write("".join(lines.values()).encode())
            self._file.flush()
        self._lines.fill(lines.items())

    def close(self) -> None:
        for file in filter(None, (self._file, self._turn)):
            file.close()


def _take_turn(path: Path) -> IO[bytes]:
    """A file that one process has at a time: a lock which ends with the process, if not before."""
    file = open(path, "ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        note(f"waiting for another run that asks for the same captions, as {path} shows")
        fcntl.lockf(file, fcntl.LOCK_EX)
    return file


def _own_file(folder: Path, writer: str) -> IO[bytes]:
    """`<writer>.jsonl`, or with a number where another process has that: whole lines, and locked while it is open."""
    for number in count(1):
        path = folder / f"{writer}{f'-{number}' if number > 1 else ''}.jsonl"
        file = open(path, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        _cut_torn_line(path)
        return file


def _line(image: str, captions: Captions) -> str:
    row = {"image": image, "candidates": captions.candidates, "log_likelihoods": captions.log_likelihoods}
    row |= {key: value for key in ("problem", "tokens") if (value := getattr(captions, key)) is not None}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _captions(row: dict) -> Captions:
    return Captions(row["candidates"], row["log_likelihoods"], row.get("problem"), row.get("tokens"))


def _cut_torn_line(path: Path) -> None:
    """Cut off what a killed writer has left of its last line."""
    with open(path, "rb") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
    os.truncate(path, whole)


def _read(path: Path) -> Iterator[tuple[str, Captions]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # another writer's, which is at it
            try:
                row = json.loads(line)
                yield row["image"], _captions(row)
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}, line {number}: not a row of captions; delete the file") from None
