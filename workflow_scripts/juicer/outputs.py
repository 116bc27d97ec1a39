"""What a stage writes, from the partitions that it ends with."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from juicer.dataset import INPUT_ROW, RECAPTION, recaption_of
from juicer.partitions import column_values


def output_rows(folder: Path, image_root: Path) -> Iterator[dict]:
    """The rows as they came in, with the text as the operators left it, and `recaption` where it is a new caption.

    Args:
        folder: partitions of a dataset.

    Raises:
        InputError: an operator has replaced an image; the paths would no longer be those of the dataset.
    """
    for identifier, text, images, source, meta in column_values(folder, "id", "text", "images", INPUT_ROW, "meta"):
        row = json.loads(source)
        if images != [os.path.join(image_root, image) for image in row["images"]]:
            raise InputError(
                f"the recipe replaced the image of row {identifier!r}; take operators that edit images out"
            )
        record = recaption_of(json.loads(meta))
        yield row | {"text": text} | (record if record.get(RECAPTION, {}).get("caption") is not None else {})


def output_stats(folder: Path) -> Iterator[dict]:
    """One row per row of the dataset: its id and every stat that the operators computed."""
    for identifier, stats in column_values(folder, "id", "stats"):
        yield {"id": identifier} | json.loads(stats)
