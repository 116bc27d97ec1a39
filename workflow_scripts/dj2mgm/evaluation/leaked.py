"""What is evaluated on and is in the training data, too, as `find_leaks.py` wrote it."""

from pathlib import Path

from dj2mgm.files import read_jsonl

HELD_OUT = "held_out"


def leaked_ids(file: Path | None, of: str) -> set[str]:
    """Ids of the questions, or of the held-out rows, whose image is in the training data."""
    return (
        {identifier for leak in read_jsonl(file) if leak["of"] == of for identifier in leak["ids"]} if file else set()
    )
