"""What goes from a tool to a model and back: images as files, and answers as tools count them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dj2mgm.data.images import as_rgb


def save_once(image: Image.Image, folder: Path) -> Path:
    """The file of an image, whose name says what it shows: an image that is asked about again is there already."""
    image = as_rgb(image)
    shown = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:32]
    file = folder / f"{shown}.png"
    if not file.exists():
        image.save(file, compress_level=1)
    return file


def cut(answer: str, until: Iterable[str]) -> str:
    """An answer up to the first of the texts that end it, without blanks around it."""
    answer = answer.strip()
    for end in filter(None, until):
        answer = answer.split(end)[0]
    return answer.strip()
