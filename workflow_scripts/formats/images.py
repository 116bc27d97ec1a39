"""Opening one image of a dataset, with a named reason when that is not possible."""

import os
import stat
from functools import cache
from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageFile


class BadImage(Exception):
    """An image that cannot be used. `reason` is one of REASONS; the message adds the detail."""

    REASONS = ("missing", "outside", "empty", "undecodable")

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)  # both, so that another process can raise it again
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(self.args)


def locate_image(root: str | Path, relative: str) -> Path:
    """Absolute path of an image, which must lie inside the dataset's image folder `root`.

    Raises:
        BadImage: `outside` for a path that leaves the folder (`..`, absolute, or through a link), `missing`, `empty`.
    """
    real_root = _real(str(root))
    try:
        path = os.path.realpath(os.path.join(real_root, relative))
        outside = os.path.commonpath([real_root, path]) != real_root
        status = None if outside else os.stat(path)
    except (OSError, ValueError) as error:  # not there, a name too long, a null byte, links in a circle
        raise BadImage("missing", f"{relative!r} names no file: {error}") from None
    if outside:
        raise BadImage("outside", f"{relative} leaves the image folder {root}")
    if not stat.S_ISREG(status.st_mode):
        raise BadImage("missing", f"{path} is no file")
    if status.st_size == 0:
        raise BadImage("empty", f"{path} has zero bytes")
    return Path(path)


@cache
def _real(root: str) -> str:
    return os.path.realpath(root)


def load_image(path: str | Path | BinaryIO) -> Image.Image:
    """Decode the whole image, a file or its path, into RGB, (height, width) as in the file.

    Raises:
        BadImage: `undecodable` for a truncated file, one that is no image, or one too large to decode safely.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing Data-Juicer turns it on for the whole process
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError) as error:
        raise BadImage("undecodable", f"{path}: {error}") from None
