"""Functions that locate and open images of a dataset, with a named reason for each error, and held-out images."""

import base64
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import BinaryIO

from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from dj2mgm.errors import InputError, quote_value
from dj2mgm.storage.files import list_homes, read_json
from dj2mgm.storage.image_files import IMAGE_FOLDERS_FILE, compute_image_digest, parse_member, read_file_size

# Pillow's names of the supported formats. No other format is tried for any file, because Pillow's
# reader of EPS starts Ghostscript. JPEG includes MPO, a file of several JPEGs that phones write.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
SUFFIX_BY_FORMAT = dict.fromkeys(("JPEG", "MPO"), ".jpg") | {name: f".{name.lower()}" for name in IMAGE_FORMATS[1:]}
MAX_PIXELS = 89_478_485  # Pillow only warns above this; decoding and converting take at most 8 bytes per pixel
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
PGM = ("I", "PPM")  # Pillow's mode and format; it scales the values to 16 bits
TURNS_BY_ORIENTATION = {  # by EXIF orientation (CIPA DC-008, tag 0x0112); 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS_TURNS = {
    TURNS_BY_ORIENTATION[orientation] for orientation in (5, 6, 7, 8)
}  # turns that exchange width and height
# ISO/IEC 14496-12: a box `ftyp` has the file's brands, of which HEIF and AVIF have these (ISO/IEC 23008-12, AV1)
HEIF_BRANDS = ("heic", "heix", "heim", "heis", "hevc", "hevx", "mif1", "mif2", "msf1", "avif", "avis")
HEIF_HEADER = re.compile(rb".{4}ftyp(?:.{4}){0,8}?(?:%s)" % "|".join(HEIF_BRANDS).encode(), re.DOTALL)
HEADER_SIZE = 64
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_TEXTS, PNG_KEYWORD = (b"iTXt", b"tEXt", b"zTXt"), 80  # chunks, and the longest keyword at their start in bytes
ORIENTATION_KEYS = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # keys of Pillow's `info`


class BadImageError(Exception):
    """Image that cannot be used; `reason` is one of REASONS, and the message adds the detail."""

    REASONS = ("missing", "outside", "empty", "undecodable")

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)  # both arguments, so that the error can be pickled
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(self.args)


class UnreadableImages:
    """Counts of unusable images by reason, and the first path."""

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
    """Return the absolute path of an image inside the dataset's image folder `root`.

    Args:
        root: a folder, or the file `IMAGE_FOLDERS_FILE` of a dataset of several sources, which names a folder for each
            source; paths then begin with the source's name.
        relative: path of a file or of a member of a tar file (image_files.py).

    Raises:
        BadImageError: `outside` for a path that leaves the folder (`..`, absolute, or through a link), `missing` or
            `empty`.
    """
    path, folders = _join(str(root), relative)
    member = parse_member(path)
    try:
        real = os.path.realpath(member.archive if member else path)
        outside = not os.path.join(real, "").startswith(tuple(os.path.join(folder, "") for folder in folders))
        status = None if outside else os.stat(real)
    except (OSError, ValueError) as error:  # missing, name too long, null byte, circular links
        raise BadImageError("missing", f"{quote_value(relative)} does not exist: {error}") from None
    if outside:
        raise BadImageError("outside", f"{relative} leaves the image folder {root}")
    if not stat.S_ISREG(status.st_mode):
        raise BadImageError("missing", f"{real} is not a file")
    if (member.size if member else status.st_size) == 0:
        raise BadImageError("empty", f"{path} has zero bytes")
    return Path(path) if member else Path(real)  # an archive's link may point to a name without the suffix .tar


def join_image_path(root: str | Path, relative: str) -> str:
    """Return the path that `locate_image` checks, even if there is no usable image."""
    return _join(str(root), relative)[0]


def _join(root: str, relative: str) -> tuple[str, list[str]]:
    """Return the path, and the real folders that may contain it."""
    if os.path.basename(root) != IMAGE_FOLDERS_FILE:
        return os.path.join(_resolve_folder(root), relative), _list_homes(root)
    folders = _find_source_folders(root)
    if os.path.isabs(relative):
        return relative, [home for folder in folders.values() for home in _list_homes(folder)]
    name, _, rest = relative.partition("/")
    if name not in folders:
        raise BadImageError("missing", f"{quote_value(relative)} does not begin with a source of {root}")
    return os.path.join(_resolve_folder(folders[name]), rest), _list_homes(folders[name])


def list_image_folders(root: str | Path) -> dict[str, str]:
    """Return the real image folder of each source of `root` (see `locate_image`); that of a single folder is at ""."""
    if os.path.basename(root) != IMAGE_FOLDERS_FILE:
        return {"": _resolve_folder(str(root))}
    return {source: _resolve_folder(folder) for source, folder in _find_source_folders(str(root)).items()}


@cache
def _resolve_folder(root: str) -> str:
    return os.path.realpath(root)


@cache
def _list_homes(root: str) -> list[str]:
    return [str(home) for home in list_homes(Path(root))]


def _find_source_folders(file: str) -> dict[str, str]:
    try:
        return _read_folders(file, os.stat(file).st_mtime_ns)
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; make it again with `--forcerun make_dataset`") from None


@cache
def _read_folders(file: str, _: int) -> dict[str, str]:
    here = os.path.dirname(os.path.abspath(file))
    return {name: os.path.join(here, folder) for name, folder in read_json(file).items()}


def read_image_size(source: str | Path) -> tuple[int, int]:
    """Return the width and height of the upright image, from the file's header.

    Raises:
        BadImageError: `undecodable` for a file without the header of one of `IMAGE_FORMATS`, or of more than
            `MAX_PIXELS`.
    """
    with _open_header(source) as image:
        _check_pixels(image)
        width, height = image.size
        return (height, width) if _find_header_turn(image) in SIDEWAYS_TURNS else (width, height)


def is_heif(path: str | Path) -> bool:
    """Return whether a file's header is that of HEIF or AVIF, whatever its name ends with."""
    try:
        if member := parse_member(path):
            return HEIF_HEADER.match(member.read()) is not None
        with open(path, "rb") as file:
            return HEIF_HEADER.match(file.read(HEADER_SIZE)) is not None
    except OSError:
        return False


def detect_suffix(content: bytes) -> str:
    """Return the file name suffix for an image with this content; raise BadImageError like `image_size`."""
    with _open_header(content) as image:
        return SUFFIX_BY_FORMAT[image.format]


@contextmanager
def _open_header(source: str | Path | bytes) -> Iterator[Image.Image]:
    """Open an image without decoding it; any error becomes BadImageError."""
    try:
        with Image.open(_to_openable(source), formats=IMAGE_FORMATS) as image:
            yield image
    except Exception as error:  # Pillow raises errors of any type on damaged bytes
        name = "the image" if isinstance(source, bytes) else source
        raise BadImageError("undecodable", f"{name}: {error or type(error).__name__}") from None


def load_image(source: str | Path | bytes | BinaryIO, longest_side: int | None = None) -> Image.Image:
    """Decode a complete image into upright RGB.

    The image is turned by its EXIF orientation, as viewers and `transformers.image_utils.load_image` do. The result has
    no orientation tag left, so that nothing turns it twice. Only the first frame is used. Transparency is dropped.

    A JPEG whose longest side is at least four times `longest_side` is decoded at 1/2, 1/4 or 1/8 of its size, so that
    at least twice `longest_side` pixels remain.

    Args:
        source: a file, its path or its bytes.
        longest_side: pixels that the caller needs; None: the full size.

    Raises:
        BadImageError: `undecodable` for a truncated file, a format outside `IMAGE_FORMATS`, more than `MAX_PIXELS`, or
            pixel values of unknown range.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing Data-Juicer turns it on for the whole process
    name = source if isinstance(source, str | Path) else "the image"
    try:
        with Image.open(_to_openable(source), formats=IMAGE_FORMATS) as image:
            _check_pixels(image)
            if longest_side:
                scale = 2 * longest_side / max(image.size)
                image.draft(None, tuple(ceil(scale * side) for side in image.size))
            pixels = convert_to_rgb(image)
            # after decoding: a PNG may store EXIF after its pixels, and Pillow turns TIFF itself
            turn = _find_turn(image)
    except UnidentifiedImageError:
        raise BadImageError(
            "undecodable",
            f"{name} is not an image of the formats {', '.join(IMAGE_FORMATS)}; convert it to one of them",
        ) from None
    except Exception as error:  # decoders raise errors of any type on damaged bytes
        raise BadImageError("undecodable", f"{name}: {error or type(error).__name__}") from None
    upright = pixels if turn is None else pixels.transpose(turn)
    for key in ORIENTATION_KEYS:
        upright.info.pop(key, None)
    return upright


def encode_data_url(image: Image.Image, kind: str, **options: int) -> str:
    """Return an image as a data URL; `kind` is Pillow's name of the format, `options` are options of its writer."""
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB without turning it; raise ValueError if its pixel values have no known range."""
    return (_convert_to_eight_bits(image) if image.mode[0] in "IF" else image).convert("RGB")


def _find_turn(image: Image.Image) -> Image.Transpose | None:
    """Return the turn that makes an image upright; None if it is upright or its EXIF is damaged.

    The image must be decoded, unless its format stores no orientation after the pixels.
    """
    try:
        exif = Image.Image.getexif(image)  # PNG's own method would decode the image
        return TURNS_BY_ORIENTATION.get(exif.get(ExifTags.Base.Orientation))
    except Exception:  # Pillow's EXIF readers raise errors of any type; viewers do not turn such an image
        return None


def _find_header_turn(image: Image.Image) -> Image.Transpose | None:
    """Return the turn that is not yet part of `image.size` while only the header is read."""
    if image.format == "TIFF" and ExifTags.Base.Orientation in image.tag_v2:
        return None  # Pillow has already exchanged width and height
    if image.format == "PNG" and _has_metadata_behind_pixels(image.fp):
        image.load()
    return _find_turn(image)


def _has_metadata_behind_pixels(png: BinaryIO) -> bool:
    """Return whether a PNG may store an orientation after its pixels, where Pillow reads it only on decoding."""
    before = png.tell()
    png.seek(len(PNG_SIGNATURE))
    pixels = has_orientation = False
    while not has_orientation and len(head := png.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        pixels = pixels or name == b"IDAT"
        after = png.tell() + length + 4  # data and checksum
        if pixels and name in PNG_TEXTS:
            keyword = png.read(min(length, PNG_KEYWORD)).partition(b"\0")[0]
            has_orientation = keyword.decode("latin-1") in ORIENTATION_KEYS
        has_orientation = has_orientation or (pixels and name == b"eXIf")
        png.seek(after)
    png.seek(before)
    return has_orientation


def _to_openable(source: str | Path | bytes | BinaryIO) -> str | Path | BinaryIO:
    """Return an object that Pillow can open."""
    if isinstance(source, str | Path) and (member := parse_member(source)):
        source = member.read()
    return BytesIO(source) if isinstance(source, bytes) else source


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"more than {MAX_PIXELS} pixels ({image.width} x {image.height}); scale it down")


def _convert_to_eight_bits(image: Image.Image) -> Image.Image:
    """Map a 16-bit gray image to 256 levels over the whole range of its type; Pillow would clip values above 255."""
    if image.mode not in SIXTEEN_BITS and (image.mode, image.format) != PGM:
        raise ValueError(
            f"its pixel values (Pillow's mode {image.mode}) have no known range; convert the image to 8 bits"
        )
    tags = getattr(image, "tag_v2", {})  # a TIFF may have 12 bits per pixel, and zero for white
    [bits] = tags.get(ExifTags.Base.BitsPerSample, (16,))
    scale, offset = 255 / (2**bits - 1), 0.5
    if tags.get(ExifTags.Base.PhotometricInterpretation) == 0:
        scale, offset = -scale, 255.5
    return image.convert("I").point(lambda level: level * scale + offset).convert("L")


class HeldOutImages:
    """Images of evaluation rows, whose paths are relative to `root`; each takes a few hundred bytes of memory."""

    def __init__(self, rows: Iterable[dict] = (), root: str | Path = ""):
        self._paths: set[Path] = set()
        self._sizes: set[int] = set()
        self._digests: set[str] = set()
        for row in rows:
            try:
                self._add(locate_image(root, row["image"]))
            except (BadImageError, OSError) as error:
                raise InputError(f"evaluation row {row['id']}: {error}; fix the image or delete the row") from None

    def __len__(self) -> int:
        """Return the number of different images."""
        return len(self._digests)

    def match(self, path: Path) -> str | None:
        """Return `file` for the file of a held-out image, `copy` for a file with the same bytes, and None otherwise.

        Only files with the size of a held-out image are read. The path comes from `locate_image`.
        """
        if path in self._paths:
            return "file"
        if read_file_size(path) in self._sizes and compute_image_digest(path) in self._digests:
            return "copy"
        return None

    def _add(self, path: Path) -> None:
        self._paths.add(path)
        self._sizes.add(read_file_size(path))
        self._digests.add(compute_image_digest(path))
