"""Opening one image of a dataset, with a named reason when that is not possible."""

import os
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import BinaryIO

from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from dj2mgm.data.shards import parse_member
from dj2mgm.errors import InputError
from dj2mgm.files import SOURCES, read_json

# Pillow's names of what pictures come as. No other format is tried, whatever a file is called: Pillow's reader of EPS
# starts Ghostscript. JPEG includes MPO, several JPEGs in a file, which phones write.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
SUFFIXES = dict.fromkeys(("JPEG", "MPO"), ".jpg") | {name: f".{name.lower()}" for name in FORMATS[1:]}
MAX_PIXELS = 89_478_485  # Pillow's own limit, where it only warns; decoding and converting take at most 8 bytes a pixel
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
PGM = ("I", "PPM")  # Pillow's mode and format; it scales the numbers to 16 bits
TURNS = {  # by EXIF's orientation (CIPA DC-008, tag 0x0112); 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = {TURNS[orientation] for orientation in (5, 6, 7, 8)}  # these exchange width and height
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_TEXTS, PNG_KEYWORD = (b"iTXt", b"tEXt", b"zTXt"), 80  # chunks, and bytes of the keyword that each begins with
ORIENTED = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # keys of Pillow's `info`


class BadImage(Exception):
    """An image that cannot be used. `reason` is one of REASONS; the message adds the detail."""

    REASONS = ("missing", "outside", "empty", "undecodable")

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)  # both, so that another process can raise it again
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(self.args)


class UnreadableImages:
    """Counts images that cannot be used, by reason, and keeps the first."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.first = ""

    def add(self, reason: str, path: str) -> None:
        self.reasons[reason] += 1
        self.first = self.first or path

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        return f"{counts}; the first is {self.first}"


def locate_image(root: str | Path, relative: str) -> Path:
    """Absolute path of an image, which must lie inside the dataset's image folder `root`.

    Args:
        root: a folder, or the file of a dataset of several sources that names a folder for each (`SOURCES`); paths
            then begin with the source's name.
        relative: also of a member of a tar file (data/shards.py).

    Raises:
        BadImage: `outside` for a path that leaves the folder (`..`, absolute, or through a link), `missing`, `empty`.
    """
    path, folders = _join(str(root), relative)
    member = parse_member(path)
    try:
        real = os.path.realpath(member.archive if member else path)
        outside = all(os.path.commonpath([folder, real]) != folder for folder in folders)
        status = None if outside else os.stat(real)
    except (OSError, ValueError) as error:  # not there, a name too long, a null byte, links in a circle
        raise BadImage("missing", f"{relative!r} names no file: {error}") from None
    if outside:
        raise BadImage("outside", f"{relative} leaves the image folder {root}")
    if not stat.S_ISREG(status.st_mode):
        raise BadImage("missing", f"{real} is no file")
    if (member.size if member else status.st_size) == 0:
        raise BadImage("empty", f"{path} has zero bytes")
    return Path(path) if member else Path(real)  # an archive's own name may be a link to one that says nothing


def absolute_path(root: str | Path, relative: str) -> str:
    """Where `locate_image` looks, whether or not there is an image that it lets through."""
    return _join(str(root), relative)[0]


def _join(root: str, relative: str) -> tuple[str, list[str]]:
    """The path, and the real folders that it may lie in."""
    if os.path.basename(root) != SOURCES:
        return os.path.join(_real(root), relative), [_real(root)]
    folders = _folders_of(root)
    if os.path.isabs(relative):
        return relative, [_real(folder) for folder in folders.values()]
    name, _, rest = relative.partition("/")
    if name not in folders:
        raise BadImage("missing", f"{relative!r} begins with no source of {root}")
    return os.path.join(_real(folders[name]), rest), [_real(folders[name])]


@cache
def _real(root: str) -> str:
    return os.path.realpath(root)


def _folders_of(file: str) -> dict[str, str]:
    try:
        return _read_folders(file, os.stat(file).st_mtime_ns)
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; make it again with `--forcerun make_dataset`") from None


@cache
def _read_folders(file: str, _: int) -> dict[str, str]:
    here = os.path.dirname(os.path.abspath(file))
    return {name: os.path.join(here, folder) for name, folder in read_json(file).items()}


def image_size(source: str | Path) -> tuple[int, int]:
    """Return the width and height of the upright image, from the file's header.

    Raises:
        BadImage: `undecodable` for a file without the header of one of `FORMATS`, or of more than `MAX_PIXELS`.
    """
    with _header(source) as image:
        _check_pixels(image)
        width, height = image.size
        return (height, width) if _header_turn(image) in SIDEWAYS else (width, height)


def detect_suffix(content: bytes) -> str:
    """What the name of an image file with this content ends with.

    Raises:
        BadImage: as `image_size`.
    """
    with _header(content) as image:
        return SUFFIXES[image.format]


@contextmanager
def _header(source: str | Path | bytes) -> Iterator[Image.Image]:
    """The image as far as its header says; an error on the way is the image's."""
    try:
        with Image.open(_file_of(source), formats=FORMATS) as image:
            yield image
    except Exception as error:  # readers raise errors of any type on damaged bytes
        name = "the image" if isinstance(source, bytes) else source
        raise BadImage("undecodable", f"{name}: {error or type(error).__name__}") from None


def load_image(source: str | Path | bytes | BinaryIO, longest_side: int | None = None) -> Image.Image:
    """Decode the whole image, a file, its path or its bytes, into upright RGB.

    The image is turned by its EXIF orientation, as viewers and `transformers.image_utils.load_image` do. The result
    carries no orientation any more, so that nothing turns it twice. Of several frames the first is taken. Transparency
    is dropped.

    With `longest_side`, in pixels, a JPEG of at least four times as many is decoded at 1/2, 1/4 or 1/8 of its size, of
    which at least twice as many are left.

    Raises:
        BadImage: `undecodable` for a truncated file, one that is no image of `FORMATS`, one of more than `MAX_PIXELS`,
            or one whose numbers have no range that its type tells.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing Data-Juicer turns it on for the whole process
    name = source if isinstance(source, str | Path) else "the image"
    try:
        with Image.open(_file_of(source), formats=FORMATS) as image:
            _check_pixels(image)
            if longest_side:
                scale = 2 * longest_side / max(image.size)
                image.draft(None, tuple(ceil(scale * side) for side in image.size))
            pixels = as_rgb(image)
            turn = _turn(image)  # once decoded: PNG may have its EXIF behind the pixels, and Pillow turns TIFF itself
    except UnidentifiedImageError:
        raise BadImage(
            "undecodable", f"{name} is no image of the formats {', '.join(FORMATS)}; convert it to one of them"
        ) from None
    except Exception as error:  # decoders raise errors of any type on damaged bytes
        raise BadImage("undecodable", f"{name}: {error or type(error).__name__}") from None
    upright = pixels if turn is None else pixels.transpose(turn)
    for key in ORIENTED:
        upright.info.pop(key, None)
    return upright


def as_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB, not turned.

    Raises:
        ValueError: its numbers have no known range.
    """
    return (_eight_bits(image) if image.mode[0] in "IF" else image).convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the turn that makes an image upright, None if it is upright or its EXIF is damaged.

    The image is decoded, or it is a header without an orientation behind the pixels.
    """
    try:
        exif = Image.Image.getexif(image)  # the one of PNG decodes the image
        return TURNS.get(exif.get(ExifTags.Base.Orientation))
    except Exception:  # Pillow's readers of EXIF raise errors of any type; viewers show such an image as it is
        return None


def _header_turn(image: Image.Image) -> Image.Transpose | None:
    """Return the turn that `image.size` lacks while only the header is read."""
    if image.format == "TIFF" and ExifTags.Base.Orientation in image.tag_v2:
        return None  # Pillow has exchanged width and height
    if image.format == "PNG" and _metadata_behind_pixels(image.fp):
        image.load()
    return _turn(image)


def _metadata_behind_pixels(png: BinaryIO) -> bool:
    """Return whether an orientation may stand behind a PNG's pixels; Pillow reads it there when it decodes them."""
    before = png.tell()
    png.seek(len(PNG_SIGNATURE))
    pixels = found = False
    while not found and len(head := png.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        pixels = pixels or name == b"IDAT"
        after = png.tell() + length + 4  # its checksum, too
        if pixels and name in PNG_TEXTS:
            keyword = png.read(min(length, PNG_KEYWORD)).partition(b"\0")[0]
            found = keyword.decode("latin-1") in ORIENTED
        found = found or (pixels and name == b"eXIf")
        png.seek(after)
    png.seek(before)
    return found


def _file_of(source: str | Path | bytes | BinaryIO) -> str | Path | BinaryIO:
    """What Pillow opens."""
    if isinstance(source, str | Path) and (member := parse_member(source)):
        source = member.read()
    return BytesIO(source) if isinstance(source, bytes) else source


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"more than {MAX_PIXELS} pixels ({image.width} x {image.height}); scale it down")


def _eight_bits(image: Image.Image) -> Image.Image:
    """A gray image of 16 bits in 256 levels, from the whole range of its type; Pillow would cut off all above 255."""
    if image.mode not in SIXTEEN_BITS and (image.mode, image.format) != PGM:
        raise ValueError(f"its numbers (Pillow's mode {image.mode}) have no known range; convert the image to 8 bits")
    tags = getattr(image, "tag_v2", {})  # of a TIFF, which may have 12 bits a pixel, and zero for white
    [bits] = tags.get(ExifTags.Base.BitsPerSample, (16,))
    scale, offset = 255 / (2**bits - 1), 0.5
    if tags.get(ExifTags.Base.PhotometricInterpretation) == 0:
        scale, offset = -scale, 255.5
    return image.convert("I").point(lambda level: level * scale + offset).convert("L")
