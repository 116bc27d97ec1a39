"""Fingerprints of the user's files, which detect a changed file independently of its time stamp.

Snakemake compares time stamps, so it does not notice a replaced file with an older time stamp (`cp -p`, `rsync -t`). A
fingerprint is a parameter of the rules that read the file, and a changed parameter runs a rule again.
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
from dj2mgm.storage.files import compute_sha256, read_json, write_json
from dj2mgm.storage.image_files import IMAGE_SUFFIXES, rebase_image_path

MAX_READ_BYTES = 256 << 20  # bytes; larger files are represented by size, time and blocks of their content
BLOCK_BYTES, BLOCKS = 1 << 16, 64
MAX_IMAGES = 20_000  # most images of a list that a fingerprint represents, by size and time
CONTENT_READS = 64  # most images that a fingerprint represents by content, too
MAX_LIST_BYTES = 1 << 30  # bytes of a list of images that are read; names after them are not found
SETTLED_S = 2.0  # digests of newer files are not stored: these may change again within the same time stamp
# possible names in a list of images: JSON strings or table cells
IN_JSON, IN_TABLE = re.compile(rb'[^"\r\n]+'), re.compile(rb'[^"\t\r\n,]+')
ENCODED_SUFFIXES = tuple(suffix.encode() for suffix in IMAGE_SUFFIXES)


class Fingerprints:
    """Fingerprints of files; digests are stored between starts of Snakemake.

    A stored digest is valid while path, size, mtime, ctime and inode stay the same. Replacing a file changes its ctime,
    which no tool can set.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stored = self._read()
        self._changed = False
        self._fingerprints: dict[tuple, str] = {}

    def hash_files(self, files: Iterable[str]) -> str:
        """Return the fingerprint of files: images by size and time, a few of them and all other files by content."""
        files = tuple(files)
        if files not in self._fingerprints:
            images = [file for file in files if file.lower().endswith(IMAGE_SUFFIXES)]
            others = [[file, self._digest_file(file)] for file in sorted({*files} - {*images})]
            self._fingerprints[files] = _compute_digest([*others, *self._describe_images(images, len(images))])
        return self._fingerprints[files]

    def hash_images(self, lists: Iterable[tuple[str, str]]) -> str:
        """Return the fingerprint of the images that lists name: pairs of a list's file and the folder of its images."""
        lists = tuple(lists)
        if lists not in self._fingerprints:
            images = {
                os.path.join(folder, rebase_image_path(name, file, folder))
                for file, folder in lists
                for name in self._list_names(file)
            }
            self._fingerprints[lists] = _compute_digest(list(self._describe_images(images, MAX_IMAGES)))
        return self._fingerprints[lists]

    def save(self) -> None:
        """Store the digests for the next start."""
        if self._changed:
            write_json(self.path, self._stored)
            self._changed = False

    def _describe_images(self, images: Iterable[str], limit: int) -> Iterator[list]:
        sample = _select_smallest(images, limit)
        for index, image in enumerate(sample):
            state = _read_state(image)
            size_and_time = None if state is None else state[:2]
            yield [image, size_and_time, self._digest_file(image) if index < CONTENT_READS else None]

    def _digest_file(self, file: str) -> str | None:
        """Return the digest of a file's content; None if it is missing."""
        state = _read_state(file)
        if state is None:
            return None
        return self._find_or_compute(f"content {os.path.abspath(file)}", state, lambda: _digest_content(file, state))

    def _list_names(self, file: str) -> list[str]:
        """Return the images that a file names, or a sample of them."""
        state = _read_state(file)
        if state is None:
            return []
        return self._find_or_compute(f"names {os.path.abspath(file)}", state, lambda: _find_image_names(file))

    def _find_or_compute(self, key: str, state: list[int], compute):
        """Return the stored value if the state is the same. Otherwise compute it, and store it if the file is old."""
        entry = self._stored.get(key)
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == state:
            return entry[1]
        value = compute()
        if time.time() - max(state[1:3]) / 1e9 > SETTLED_S:
            self._stored[key], self._changed = [state, value], True
        return value

    def _read(self) -> dict:
        try:
            return dict(read_json(self.path))
        except (OSError, InputError):
            return {}


def _read_state(file: str) -> list[int] | None:
    """Return size, mtime and ctime in nanoseconds, and inode; None if there is no regular file.

    Pipes and devices are excluded, because reading one would not end.
    """
    try:
        status = os.stat(file)
    except (OSError, ValueError):  # ValueError: a null byte
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest_content(file: str, state: list[int]) -> str | None:
    size = state[0]
    try:
        if size <= MAX_READ_BYTES:
            return compute_sha256(file)
        digest = hashlib.sha256(json.dumps(state[:2]).encode())
        with open(file, "rb") as stream:
            for number in range(BLOCKS):
                stream.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    except OSError:  # the stage that reads it reports the reason
        return None
    return digest.hexdigest()


def _find_image_names(file: str) -> list[str]:
    words = IN_JSON if file.lower().endswith((".json", ".jsonl")) else IN_TABLE
    try:
        with open(file, "rb") as stream:
            names = {
                word[0]
                for word in words.finditer(stream.read(MAX_LIST_BYTES))
                if word[0].lower().endswith(ENCODED_SUFFIXES)
            }
    except OSError:
        return []
    return _select_smallest(map(_decode_name, names), MAX_IMAGES)


def _decode_name(name: bytes) -> str:
    """Decode the escapes of a name if it is a JSON string."""
    text = name.decode("utf-8", errors="replace").strip()
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _select_smallest(names: Iterable[str], limit: int) -> list[str]:
    """Return the names with the smallest digests, a sample that does not depend on their order."""
    return sorted(set(names), key=lambda name: hashlib.sha256(name.encode(errors="replace")).digest())[:limit]


def _compute_digest(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
