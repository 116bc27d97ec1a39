"""Rows of the held-out split: an image with reference captions and, if known, questions and objects.

{"id": "e00001", "image": "images/evaluation/e00001.png", "captions": ["a red circle at the top left"],
"objects": [{"color": "red", "shape": "circle", "position": "top left"}],
"questions": [{"type": "color", "question": "What color is the circle?", "answer": "red"}]}
"""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.data.formats import check_no_control, check_no_control_character
from dj2mgm.data.json_rows import UniqueIds, read_objects
from dj2mgm.errors import InputError

OBJECT_KEYS = {"color", "shape", "position"}
QUESTION_KEYS = {"type", "question", "answer"}


def read_evaluation(path: str | Path) -> Iterator[dict]:
    """Yield the validated rows of a user's file; missing `objects` and `questions` become empty lists."""
    ids = UniqueIds(path)
    for number, row in read_objects(path):
        location = f"{path}, line {number}"
        if not isinstance(row.get("id"), str) or not isinstance(row.get("image"), str):
            raise InputError(f"{location}: 'id' and 'image' must be strings")
        ids.add(row["id"], number)
        captions = row.get("captions")
        if not isinstance(captions, list) or not captions or not all(isinstance(c, str) and c for c in captions):
            raise InputError(f"{location}: 'captions' must be a list of at least one reference caption")
        for key, keys in (("objects", OBJECT_KEYS), ("questions", QUESTION_KEYS)):
            items = row.setdefault(key, [])
            if not isinstance(items, list) or not all(isinstance(i, dict) and set(i) == keys for i in items):
                raise InputError(f"{location}: {key!r} must be a list of objects with the keys {sorted(keys)}")
            if wrong := [value for item in items for value in item.values() if not isinstance(value, str)]:
                raise InputError(f"{location}: the values in {key!r} must be strings, found {wrong[0]!r}")
        for item in row["questions"]:
            check_no_control(item["question"], location)
        for text in (*captions, *(item["answer"] for item in row["questions"])):
            check_no_control_character(text, location)
        yield row
