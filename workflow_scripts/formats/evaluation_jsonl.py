"""The held-out split: one image a line, with reference captions, and questions and objects where they are known.

{"id": "e00001", "image": "images/evaluation/e00001.png", "captions": ["a red circle at the top left"],
 "objects": [{"color": "red", "shape": "circle", "position": "top left"}],
 "questions": [{"type": "color", "question": "What color is the circle?", "answer": "red"}]}
"""

from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from formats.prompts import check_no_control
from formats.rows import UniqueIds, read_objects

OBJECT_KEYS = {"color", "shape", "position"}
QUESTION_KEYS = {"type", "question", "answer"}


def read_evaluation(path: str | Path) -> Iterator[dict]:
    """Yield validated rows; `objects` and `questions` become empty lists where a row has none.

    Raises:
        InputError: names the file, the line and the remedy; also for a question that holds a control token, since it is
            put to the model.
    """
    ids = UniqueIds(path)
    for number, row in read_objects(path):
        where = f"{path}, line {number}"
        if not isinstance(row.get("id"), str) or not isinstance(row.get("image"), str):
            raise InputError(f"{where}: 'id' and 'image' must be strings")
        ids.add(row["id"], number)
        captions = row.get("captions")
        if not isinstance(captions, list) or not captions or not all(isinstance(c, str) and c for c in captions):
            raise InputError(f"{where}: 'captions' must be a list of at least one reference caption")
        for key, wanted in (("objects", OBJECT_KEYS), ("questions", QUESTION_KEYS)):
            items = row.setdefault(key, [])
            if not isinstance(items, list) or not all(isinstance(i, dict) and set(i) == wanted for i in items):
                raise InputError(f"{where}: {key!r} must be a list of objects with the keys {sorted(wanted)}")
            if wrong := [value for item in items for value in item.values() if not isinstance(value, str)]:
                raise InputError(f"{where}: the values in {key!r} must be texts, found {wrong[0]!r}")
        for item in row["questions"]:
            check_no_control(item["question"], where)
        yield row
