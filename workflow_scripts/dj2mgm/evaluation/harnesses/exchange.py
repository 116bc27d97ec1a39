"""What goes from a tool to a model and back: images as files, and answers as tools count them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dj2mgm.data.images import as_rgb
from dj2mgm.files import FIX, read_json

BLANK_LINE = "\n\n"  # the `until` that lmms-eval gives to tasks that name none
# Types of models whose class in lmms-eval 0.7.3 cuts answers at the texts of `until`, and which of these it leaves out.
# The classes of all other types return answers whole, as do the classes for models without one of their own. Where
# lmms-eval has two classes of a model, it takes the one in `models/chat`, and so does this table.
CUTTING_CLASSES: dict[str, frozenset[str]] = {
    "gemma3": frozenset({BLANK_LINE}),
    "gemma4": frozenset({BLANK_LINE}),
    "glm4v": frozenset(),
    "llama4": frozenset(),
    "qwen2_vl": frozenset(),
}


def save_once(image: Image.Image, folder: Path) -> Path:
    """The file of an image, whose name says what it shows: an image that is asked about again is there already."""
    image = as_rgb(image)
    shown = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:32]
    file = folder / f"{shown}.png"
    if not file.exists():
        image.save(file, compress_level=1)
    return file


def texts_that_end(model: Path, until: Iterable[str] | str | None) -> list[str]:
    """Return the texts at which lmms-eval's own class of a model cuts its answers.

    Args:
        model: Folder of a whole model.
        until: What the task names, or lmms-eval's default for it.
    """
    left_out = CUTTING_CLASSES.get(read_json(model / "config.json", remedy=FIX).get("model_type"))
    if left_out is None:
        return []
    named = [until] if isinstance(until, str) else until or []
    return [text for text in named if text and text not in left_out]


def cut(answer: str, until: Iterable[str]) -> str:
    """Return an answer up to the first of the texts that end it, without blanks around it."""
    answer = answer.strip()
    for end in until:
        answer = answer.split(end)[0]
    return answer.strip()
