"""Reader of the evaluation images that `find_leaks.py` found in the training data."""

from pathlib import Path

from dj2mgm.storage.files import read_jsonl

HELD_OUT = "held_out"


def read_leaked_ids(file: Path | None, origin: str) -> set[str]:
    """Return the ids of the questions or held-out rows whose image is in the training data, from the file of leaks.

    `origin` is the name of a benchmark, or `HELD_OUT`.
    """
    if file is None:
        return set()
    return {identifier for leak in read_jsonl(file) if leak["of"] == origin for identifier in leak["ids"]}
