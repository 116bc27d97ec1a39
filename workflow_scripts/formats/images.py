"""Opening one image of a dataset, with a named reason when that is not possible."""

from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageFile


class BadImage(Exception):
    """An image that cannot be used. `reason` is one of REASONS; the message adds the detail."""

    REASONS = ("missing", "outside", "empty", "undecodable")

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def locate_image(root: str | Path, relative: str) -> Path:
    """Absolute path of an image, which must lie inside the dataset's image folder `root`.

    Raises:
        BadImage: `outside` for a path that leaves the folder (`..`, absolute, or through a link), `missing`, `empty`.
    """
    root = Path(root).resolve()
    try:
        path = (root / relative).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null byte, links in a circle
        raise BadImage("missing", f"{relative!r} names no file: {error}") from None
    if not path.is_relative_to(root):
        raise BadImage("outside", f"{relative} leaves the image folder {root}")
    if not is_file:
        raise BadImage("missing", f"{path} does not exist")
    if path.stat().st_size == 0:
        raise BadImage("empty", f"{path} has zero bytes")
    return path


def load_image(path: str | Path | BinaryIO) -> Image.Image:
    """Decode the whole image, a file or its path, into RGB, (height, width) as in the file.

    Raises:
        BadImage: `undecodable` for a truncated file, one that is no image, or one too large to decode safely.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing Data-Juicer turns it on for the whole process
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImage("undecodable", f"{path}: {error}") from None
