"""LLaVA's conversation format, as a JSON list or as one object a line.

{"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is this?"},
                                                {"from": "gpt", "value": "A cat."}]}
"""

from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from formats.json_list import read_json_list
from formats.rows import NumberedIds, UniqueIds, check_object, read_objects

IMAGE_TOKEN = "<image>"


def conversation(identifier: str, image: str, question: str, answer: str) -> dict:
    """One question and one answer about one image. An empty question is a stage-1 caption row."""
    human = f"{IMAGE_TOKEN}\n{question}" if question else IMAGE_TOKEN
    turns = [{"from": "human", "value": human}, {"from": "gpt", "value": answer}]
    return {"id": identifier, "image": image, "conversations": turns}


def read_llava(path: str | Path, number_ids: bool = False) -> Iterator[dict]:
    """Yield validated rows of a `.json` list or a `.jsonl` file. Rows without `image` are text-only.

    What the texts hold, image tokens included, is not looked at here (`formats.prompts` does that).

    Args:
        number_ids: for published files, which have several rows about one image under its id, and whole numbers for
            ids: the second row of an id `7` gets `7~2`, or the next number that no row before has.

    Raises:
        InputError: names the file, the row (from 1) and the remedy.
    """
    ids, numbered = UniqueIds(path), NumberedIds("~")
    for number, row in _numbered_rows(Path(path)):
        where = f"{path}, row {number}"
        if number_ids and isinstance(row.get("id"), int) and not isinstance(row["id"], bool):
            row = row | {"id": str(row["id"])}
        if not isinstance(row.get("id"), str):
            raise InputError(f"{where}: 'id' must be a string, found {row.get('id')!r}")
        if number_ids:
            row = row | {"id": numbered.add(row["id"])}
        else:
            ids.add(row["id"], number)
        if "image" in row and not isinstance(row["image"], str):
            raise InputError(
                f"{where}: 'image' must be a path, found {row['image']!r}; leave it out for text-only rows"
            )
        _check_turns(where, row.get("conversations"))
        yield row


def _numbered_rows(path: Path) -> Iterator[tuple[int, dict]]:
    if path.suffix == ".jsonl":
        yield from read_objects(path)
        return
    for number, row in enumerate(read_json_list(path), start=1):
        yield number, check_object(row, f"{path}, row {number}")


def _check_turns(where: str, turns: object) -> None:
    if not isinstance(turns, list) or len(turns) < 2 or len(turns) % 2:
        raise InputError(f"{where}: 'conversations' must alternate human and gpt turns, ending with gpt")
    for position, turn in enumerate(turns):
        speaker = "gpt" if position % 2 else "human"
        if not isinstance(turn, dict) or turn.get("from") != speaker or not isinstance(turn.get("value"), str):
            raise InputError(f"{where}: turn {position + 1} must be {{'from': '{speaker}', 'value': text}}")
