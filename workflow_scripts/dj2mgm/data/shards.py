"""Images inside tar files, read where they are.

`<archive>.tar/<offset>+<bytes>/<member>` stands for a path: where the member's bytes begin in the archive, and how many
they are. So every stage finds an image with one seek, in any order, and no stage unpacks or lists an archive again.
"""

import hashlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = tarfile.BLOCKSIZE  # bytes of the header before a member's own
MEMBER = re.compile(
    r"(?P<archive>.+?\.tar)/(?P<offset>\d{1,18})\+(?P<size>\d{1,18})/(?P<name>[^/].*)", re.DOTALL | re.IGNORECASE
)
AGAIN = "make the dataset again"


@dataclass(frozen=True)
class Member:
    archive: str
    offset: int  # bytes
    size: int  # bytes
    name: str

    def __str__(self) -> str:
        return f"{self.archive}/{self.offset}+{self.size}/{self.name}"

    def read(self) -> bytes:
        """
        Raises:
            OSError: the archive cannot be read, or holds something else there now.
        """
        with open(self.archive, "rb") as file:
            file.seek(max(0, self.offset - BLOCK))
            there = _size_in(file.read(BLOCK)) == self.size
            content = file.read(self.size) if there else b""
        if not there or len(content) != self.size:
            raise OSError(f"{self.archive} has changed since it was read, or is cut off; {AGAIN}")
        return content


def member_of(path: str | Path) -> Member | None:
    """What a path says about a member; None if it is that of a file."""
    match = MEMBER.fullmatch(str(path))
    return match and Member(match["archive"], int(match["offset"]), int(match["size"]), match["name"])


def read_file(path: str | Path) -> bytes:
    """All bytes of a file, or of a member of an archive."""
    member = member_of(path)
    return member.read() if member else Path(path).read_bytes()


def digest_of(path: str | Path) -> str:
    """SHA-256 of a file, or of a member of an archive."""
    return hashlib.sha256(read_file(path)).hexdigest()


def file_size(path: str | Path) -> int:
    """In bytes, of a file or of a member of an archive."""
    member = member_of(path)
    return member.size if member else Path(path).stat().st_size


def members(archive: str | Path) -> Iterator[Member]:
    """The files in an archive, in their order; memory does not grow with their number.

    Raises:
        tarfile.TarError, OSError: it is no tar file, compressed, or cut off.
    """
    with tarfile.open(archive, "r:") as tar:
        before = -1
        while (info := tar.next()) is not None:
            tar.members = []  # it would keep all
            if info.size < 0 or tar.offset <= before:  # it would never end (CVE-2025-8194)
                raise tarfile.ReadError(f"the member {info.name!r} has a negative size")
            before = tar.offset
            if info.issparse():
                raise tarfile.ReadError(f"the member {info.name!r} is sparse")
            if info.isreg():
                yield Member(str(archive), info.offset_data, info.size, info.name)
        # tarfile takes half a header, or none, for the end
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(BLOCK) != bytes(BLOCK):
            raise tarfile.ReadError("it does not end as an archive does")


def _size_in(header: bytes) -> int | None:
    """A member's size as its header has it (POSIX.1-2017, pax, ustar interchange format)."""
    digits = header[124:136].strip(b" \0")
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None
