"""Exchange with evaluation tools: images as files, and answers cut as the tools cut them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dj2mgm.data.images import convert_to_rgb
from dj2mgm.storage.files import FIX_FILE_REMEDY, read_json

BLANK_LINE = "\n\n"  # the default `until` of lmms-eval
# Model types whose class in lmms-eval 0.7.3 cuts answers at the texts of `until`, and the texts that it ignores. The
# classes of all other types, and lmms-eval's general classes, return answers uncut. If lmms-eval has two classes for a
# model, it uses the one in `models/chat`, and so does this table.
CUTTING_CLASSES: dict[str, frozenset[str]] = {
    "gemma3": frozenset({BLANK_LINE}),
    "gemma4": frozenset({BLANK_LINE}),
    "glm4v": frozenset(),
    "llama4": frozenset(),
    "qwen2_vl": frozenset(),
}


def save_once(image: Image.Image, folder: Path) -> Path:
    """Save an image under a hash of its content, so that each image is written once, and return the file."""
    image = convert_to_rgb(image)
    digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:32]
    file = folder / f"{digest}.png"
    if not file.exists():
        image.save(file, compress_level=1)
    return file


def find_stop_texts(model: Path, until: Iterable[str] | str | None) -> list[str]:
    """Return the texts at which lmms-eval's own class of a whole model cuts its answers.

    `until` is the setting of the task, or lmms-eval's default.
    """
    ignored_texts = CUTTING_CLASSES.get(read_json(model / "config.json", remedy=FIX_FILE_REMEDY).get("model_type"))
    if ignored_texts is None:
        return []
    texts = [until] if isinstance(until, str) else until or []
    return [text for text in texts if text and text not in ignored_texts]


def cut_answer(answer: str, until: Iterable[str]) -> str:
    """Return an answer up to the first of the texts that end it, without surrounding blanks."""
    answer = answer.strip()
    for end in until:
        answer = answer.split(end)[0]
    return answer.strip()
