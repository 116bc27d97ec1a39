"""Captions on disk, so that no image is captioned twice by the same captioner, whatever recipe asks.

`<folder>/<captioner's fingerprint>/<writer>.jsonl` holds one image a line:

    {"image": "<sha256 of the file>", "candidates": ["a red circle"], "log_likelihoods": [-1.2]}

All files of a fingerprint are read, each is appended to by one writer only, so that runs may share captions while they
run at the same time.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from errors import InputError

from .captioner import Captions


class CaptionStore:
    """The captions of one captioner by their image's SHA-256.

    Args:
        folder: of all captioners' captions; None: captions are kept in memory only.
        writer: name of the file that new captions are appended to.
    """

    def __init__(self, folder: Path | None, fingerprint: str, writer: str):
        self.known: dict[str, Captions] = {}
        self.file = None
        if folder is None:
            return
        own = folder / fingerprint / f"{writer}.jsonl"
        own.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(own, "ab")
        _cut_torn_line(own)
        for path in sorted(own.parent.glob("*.jsonl")):
            for image, captions in _read(path):
                self.known.setdefault(image, captions)

    def add(self, batch: dict[str, Captions]) -> None:
        """Keep a batch; it is on disk, whole, when this returns."""
        self.known.update(batch)
        if self.file:
            self.file.write(b"".join(_line(image, captions) for image, captions in batch.items()))
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()


def _line(image: str, captions: Captions) -> bytes:
    row = {"image": image, "candidates": captions.candidates, "log_likelihoods": captions.log_likelihoods}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _cut_torn_line(path: Path) -> None:
    """Cut off what a killed writer has left of its last line."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _read(path: Path) -> Iterator[tuple[str, Captions]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # another writer's, which is at it
            try:
                row = json.loads(line)
                yield row["image"], Captions(row["candidates"], row["log_likelihoods"])
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}, line {number}: not a row of captions; delete the file") from None
