"""Fingerprints of the user's files, so that a changed file is noticed whatever its time stamp is.

Snakemake compares time stamps: a file that `cp -p` or `rsync -t` puts in another's place is older than the results and
goes unnoticed. A fingerprint is a parameter of the rules that read the file, and a changed parameter runs a rule again.
"""

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import IMAGE_SUFFIXES, read_json, write_json

WHOLE = 256 << 20  # bytes; a larger file counts by its size, time and blocks of its content
BLOCK, BLOCKS = 1 << 16, 64
IMAGES = 20_000  # of a list of images, so many count by size and time
CONTENTS = 64  # and so many by content
NAMES_IN = 1 << 30  # bytes of a list of images that are searched for names
SETTLED_S = 2.0  # a file that changed a moment ago may change again within the same time stamp
# what may be a name in a list of images: a text of JSON, or a cell of a table
IN_JSON, IN_TABLE = re.compile(rb'[^"\r\n]+'), re.compile(rb'[^"\t\r\n,]+')
SUFFIXES = tuple(suffix.encode() for suffix in IMAGE_SUFFIXES)


class Fingerprints:
    """Fingerprints of files; digests are kept from one start of Snakemake to the next.

    A kept digest counts while path, size, times of content and of inode, and inode are the same: whatever replaces a
    file changes the time of its inode, which no tool sets.
    """

    def __init__(self, path: Path):
        self.path = path
        self._kept = self._read()
        self._changed = False
        self._found: dict[tuple, str] = {}

    def of_files(self, files: Iterable[str]) -> str:
        """Return the fingerprint of files: of images as `of_images`, of all others by content."""
        files = tuple(files)
        if files not in self._found:
            images = [file for file in files if file.lower().endswith(IMAGE_SUFFIXES)]
            others = [[file, self._content(file)] for file in sorted({*files} - {*images})]
            self._found[files] = _digest([*others, *self._images(images)])
        return self._found[files]

    def of_images(self, listed: Iterable[tuple[str, str]]) -> str:
        """Return the fingerprint of images that files name.

        Args:
            listed: each file that names images, and the folder that the names are relative to.
        """
        listed = tuple(listed)
        if listed not in self._found:
            images = {os.path.join(folder, name) for file, folder in listed for name in self._names_in(file)}
            self._found[listed] = _digest(list(self._images(images)))
        return self._found[listed]

    def save(self) -> None:
        """Keep the digests for the next start."""
        if self._changed:
            write_json(self.path, self._kept)
            self._changed = False

    def _images(self, images: Iterable[str]) -> Iterator[list]:
        chosen = _smallest(images, IMAGES)
        for place, image in enumerate(chosen):
            state = _state(image)
            yield [image, state and state[:2], self._content(image) if place < CONTENTS else None]

    def _content(self, file: str) -> str | None:
        """The digest of a file's content; None if it is missing."""
        state = _state(file)
        return state and self._keep(f"content {os.path.abspath(file)}", state, lambda: _digest_of(file, state))

    def _names_in(self, file: str) -> list[str]:
        """The images that a file names, or a sample of them."""
        state = _state(file)
        return state and self._keep(f"names {os.path.abspath(file)}", state, lambda: _images_named_in(file)) or []

    def _keep(self, key: str, state: list[int], compute):
        kept = self._kept.get(key)
        if isinstance(kept, list) and len(kept) == 2 and kept[0] == state:
            return kept[1]
        value = compute()
        if time.time() - max(state[1:3]) / 1e9 > SETTLED_S:
            self._kept[key], self._changed = [state, value], True
        return value

    def _read(self) -> dict:
        try:
            return dict(read_json(self.path))
        except (OSError, InputError):
            return {}


def _state(file: str) -> list[int] | None:
    """Size, times of content and inode in nanoseconds, and inode; None if there is no regular file of this name.

    A pipe or a device would be read forever.
    """
    try:
        found = os.stat(file)
    except (OSError, ValueError):  # ValueError: no file name has a null byte
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _digest_of(file: str, state: list[int]) -> str | None:
    size, digest = state[0], hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            if size <= WHOLE:
                while block := stream.read(1 << 20):
                    digest.update(block)
            else:
                digest.update(json.dumps(state[:2]).encode())
                for number in range(BLOCKS):
                    stream.seek(number * (size - BLOCK) // (BLOCKS - 1))
                    digest.update(stream.read(BLOCK))
    except OSError:  # the stage that reads it says why
        return None
    return digest.hexdigest()


def _images_named_in(file: str) -> list[str]:
    words = IN_JSON if file.lower().endswith((".json", ".jsonl")) else IN_TABLE
    try:
        with open(file, "rb") as stream:
            found = {word[0] for word in words.finditer(stream.read(NAMES_IN)) if word[0].lower().endswith(SUFFIXES)}
    except OSError:
        return []
    return _smallest(map(_text_of, found), IMAGES)


def _text_of(name: bytes) -> str:
    """A name as JSON means it, if it is a JSON text."""
    text = name.decode("utf-8", errors="replace").strip()
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _smallest(names: Iterable[str], most: int) -> list[str]:
    """The same sample of names whatever their order is: those with the smallest digests."""
    return sorted(set(names), key=lambda name: hashlib.sha256(name.encode(errors="replace")).digest())[:most]


def _digest(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
