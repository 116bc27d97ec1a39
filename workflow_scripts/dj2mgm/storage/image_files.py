"""Files of images: their names and paths, images inside tar files, and commands that unpack other archives.

`<archive>.tar/<offset>+<bytes>/<member>` is used as a path, with the offset and size of the member's bytes in the
archive. So every stage finds an image with one seek, in any order, and no stage unpacks or lists an archive again.
"""

import hashlib
import os
import re
import shlex
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dj2mgm.storage.files import compute_sha256

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
)
HEIF_SUFFIXES = (".heic", ".heif", ".hif")  # photos of phones
CONVERT_HEIF = "convert .heic and .heif to JPEG, because Pillow cannot read them"
CONVERT_RENAMED_HEIF = "convert the photos to JPEG with a program that reads HEIF; another file name is not enough"
SHRINK_IMAGES = "`mogrify -resize '1024x1024>' <images>`"
IMAGE_FOLDERS_FILE = "sources.json"  # folders by source, instead of one image folder


def leads_up(path: str) -> bool:
    """Return whether a relative path begins with `..`, also after a detour."""
    return os.path.normpath(path).split(os.sep)[0] == os.pardir


def rebase_image_path(path: str, file: str | Path, folder: str | Path) -> str:
    """Return the image path of a row relative to the image folder.

    A path that leaves the folder with `..`, or that names no file in it, may be relative to the row's file instead. If
    it leaves the folder from there, too, it is returned unchanged, and `locate_image` refuses it.
    """
    is_up = leads_up(path)
    if not is_up and os.path.lexists(os.path.join(folder, path)):
        return path
    root, home = os.path.realpath(folder), os.path.realpath(os.path.dirname(file))
    if is_up and not leads_up(os.path.relpath(os.path.join(root, path), root)):
        return path
    target = os.path.join(home, path)
    relative = os.path.relpath(target, root)
    return relative if not leads_up(relative) and (is_up or os.path.lexists(target)) else path


HEADER_BYTES = tarfile.BLOCKSIZE  # bytes of the header before a member's content
MEMBER_NAME = re.compile(
    r"(?P<archive>.+?\.tar)/(?P<offset>\d{1,18})\+(?P<size>\d{1,18})/(?P<name>[^/].*)", re.DOTALL | re.IGNORECASE
)
REMAKE_REMEDY = "make the dataset again"
MAX_MEMBER = 2**30  # bytes of a member, which is read into memory as a whole
MAX_HEADER = 2**20  # bytes of a long name or of PAX records, which tarfile reads as a whole
LONG_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
SKIPPED_AT_ONCE = 2**20  # bytes between two archives


@dataclass(frozen=True)
class Member:
    """Position of a file in an archive; its string is a path."""

    archive: str
    offset: int  # bytes
    size: int  # bytes
    name: str

    def __str__(self) -> str:
        return f"{self.archive}/{self.offset}+{self.size}/{self.name}"

    def read(self) -> bytes:
        """Return the member's bytes.

        Raises:
            OSError: the archive cannot be read or has changed, or the member is too large.
        """
        if self.size > MAX_MEMBER:
            raise OSError(f"{self.name} has {self.size} bytes; an image in an archive may have at most {MAX_MEMBER}")
        with open(self.archive, "rb") as file:
            file.seek(max(0, self.offset - HEADER_BYTES))
            unchanged = _read_size(file.read(HEADER_BYTES)) == self.size
            content = file.read(self.size) if unchanged else b""
        if not unchanged or len(content) != self.size:
            raise OSError(f"{self.archive} has changed or is truncated; {REMAKE_REMEDY}")
        return content


def parse_member(path: str | Path) -> Member | None:
    """Return the member that a path stands for; None for the path of a file."""
    match = MEMBER_NAME.fullmatch(str(path))
    if match is None:
        return None
    return Member(match["archive"], int(match["offset"]), int(match["size"]), match["name"])


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a file, or of a member of an archive."""
    member = parse_member(path)
    return member.read() if member else Path(path).read_bytes()


def compute_image_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file, or of a member of an archive."""
    if member := parse_member(path):
        return hashlib.sha256(member.read()).hexdigest()
    return compute_sha256(path)


def read_file_size(path: str | Path) -> int:
    """Return the size in bytes of a file, or of a member of an archive."""
    member = parse_member(path)
    return member.size if member else Path(path).stat().st_size


class _Header(tarfile.TarInfo):
    """Header of a member, with limited size; sparse files are refused before their maps are read."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in LONG_HEADERS:
            # records of global headers apply to all later members
            earlier_bytes = sum(len(key) + len(value) for key, value in tar.pax_headers.items())
            if self.size + earlier_bytes > MAX_HEADER:
                raise tarfile.ReadError(f"a header has {self.size} bytes; at most {MAX_HEADER} are allowed")
        return super()._proc_member(tar)

    def _refuse_sparse(self, *_: object) -> None:
        raise tarfile.ReadError(f"the member {self.name!r} is sparse")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def read_members(archive: str | Path) -> Iterator[Member]:
    """Yield the files of an archive or of several concatenated ones; memory does not grow with their number.

    Raises:
        tarfile.TarError, OSError: it is not a plain tar file, is truncated, or has a link or a device.
    """
    with open(archive, "rb") as file:
        begin: int | None = 0
        while begin is not None:
            file.seek(begin)
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as tar:
                yield from _read_members(tar, str(archive))
                begin = _find_next_archive(file, tar.offset)


def _read_members(tar: tarfile.TarFile, archive: str) -> Iterator[Member]:
    """Yield regular files; raise ReadError for links, for damaged sizes, and for a missing end of the archive."""
    previous_offset = -1
    while (info := tar.next()) is not None:
        tar.members = []  # tarfile would keep all
        if info.size < 0 or tar.offset <= previous_offset:  # an endless loop otherwise (CVE-2025-8194)
            raise tarfile.ReadError(f"the member {info.name!r} has a negative size")
        previous_offset = tar.offset
        if info.isreg():
            yield Member(archive, info.offset_data, info.size, info.name)
        elif not info.isdir():
            raise tarfile.ReadError(
                f"the member {info.name!r} is a link or a device; tar --dereference --hard-dereference writes files"
            )
    # tarfile takes a truncated or missing header for the end
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(HEADER_BYTES) != bytes(HEADER_BYTES):
        raise tarfile.ReadError("its end-of-archive block is missing")


def _find_next_archive(file: BinaryIO, end: int) -> int | None:
    """Return the start of an archive after the zeros that end another one; None if nothing follows."""
    file.seek(end)
    while content := file.read(SKIPPED_AT_ONCE):
        if (zeros := len(content) - len(content.lstrip(b"\0"))) < len(content):
            return end + zeros - zeros % HEADER_BYTES
        end += len(content)
    return None


def _read_size(header: bytes) -> int | None:
    """Return the size in a member's header, in octal digits or base 256; None if it has none."""
    try:
        return tarfile.nti(header[124:136])
    except (tarfile.HeaderError, IndexError):
        return None


ARCHIVE_SUFFIXES = (".zip", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst", ".7z", ".rar")


def advise_unpacking(file: Path) -> str:
    """Return the command that unpacks an archive, and the dataset that it makes."""
    folder = file.with_name(file.name.partition(".")[0])
    return f"Unpack it {_describe_unpacking(file, folder)}, and use {shlex.quote(f'dataset={folder}')}"


def advise_unpacking_images(image: Path) -> str | None:
    """Return the command that unpacks the archive next to rows whose image is missing; None if there is no archive."""
    folder = next((parent for parent in image.parents if parent.is_dir()), None)
    archives = (
        sorted(file for file in folder.iterdir() if file.name.lower().endswith(ARCHIVE_SUFFIXES)) if folder else []
    )
    if not archives:
        return None
    file, target = archives[0], folder
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if image.relative_to(folder).as_posix() not in archive.NameToInfo:
                target = folder / file.stem
    return f"unpack {file.name} {_describe_unpacking(file, target)}, and run the same command again"


def _describe_unpacking(file: Path, folder: Path) -> str:
    name, target = shlex.quote(str(file)), shlex.quote(str(folder))
    kind = file.suffix.lower()
    if kind == ".zip":
        return f"with `python -m zipfile --extract {name} {target}`"
    if kind in (".7z", ".rar"):
        return f"into {target}"
    option, program = ("--zstd ", " (it needs the program zstd)") if kind == ".zst" else ("", "")
    return f"with `mkdir --parents {target} && tar {option}--extract --file {name} --directory {target}`{program}"
