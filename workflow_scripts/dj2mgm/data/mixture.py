"""A dataset of several sources: their rows in the workflow's formats, one after the other.

Ids and image paths begin with the source's name, so that no two sources share one, and each row says its `source`.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from dj2mgm.data.formats import DESCRIBE, DJ_IMAGE_TOKEN, IMAGE_TOKEN, caption_of, conversation, images_of, text_of
from dj2mgm.data.rows import NumberedIds
from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError
from dj2mgm.files import SOURCES, files_at, write_json, write_jsonl


def write_mixture(sources: dict[str, dict], folder: Path, working: Path) -> tuple[dict, dict]:
    """Write the rows of each split to `working`, and the sources' image folders to `folder`.

    Args:
        sources: as config/datasets.py resolves them, by name.
        folder: the dataset's own; what readers have to write is in `images/<source>/` there.

    Returns:
        `{split: {file, images, called}}` for `write_own_data`, and by source what was read.

    Raises:
        InputError: names the file, the row or key and the remedy.
    """
    shutil.rmtree(folder / "images", ignore_errors=True)  # of sources that are no more, or are read otherwise now
    described = {
        name: Source(
            name,
            tuple(files_at(values["path"], values["suffixes"])),
            Path(values["images"]),
            values.get("columns", {}),
            folder / "images" / name,
        )
        for name, values in sources.items()
    }
    splits, counts = {}, {}
    for split in dict.fromkeys(values["split"] for values in sources.values()):
        rows: Counter = Counter()
        names = [name for name, values in sources.items() if values["split"] == split]
        file = working / f"{split}.jsonl"
        convert = _as_pair if split == "pretrain" else _as_conversation
        write_jsonl(
            file, (row for name in names for row in _rows(described[name], sources[name]["format"], convert, rows))
        )
        for name in names:
            if not rows[name]:
                raise InputError(f"sources.{name}: {sources[name]['path']} holds no rows; add some, or take it out")
            counts[name] = {"split": split, "rows": rows[name], "format": sources[name]["format"]}
        splits[split] = {"file": str(file), "images": str(folder / SOURCES), "called": f"sources {', '.join(names)}"}
    folders = {  # a project may be moved, with what it holds itself
        name: f"images/{name}" if source.own.is_dir() else str(source.images.resolve())
        for name, source in described.items()
    }
    write_json(folder / SOURCES, folders)
    return splits, counts


def _rows(source: Source, kind: str, convert, rows: Counter) -> Iterator[dict]:
    ids = NumberedIds("~")
    for row in import_module(f"dj2mgm.data.sources.{kind}").read(source):
        rows[source.name] += 1
        row = convert(row, source)
        if row.get("text", DJ_IMAGE_TOKEN).count(DJ_IMAGE_TOKEN) > 1:
            raise InputError(
                f"sources.{source.name}: the caption of row {row['id']!r} holds {DJ_IMAGE_TOKEN}, which stands for an "
                "image; take it out"
            )
        if "conversations" not in row:
            row = row | {"images": [f"{source.name}/{image}" for image in row["images"]]}
        elif images := [f"{source.name}/{image}" for image in images_of(row)]:
            row = row | {"image": images[0] if isinstance(row["image"], str) else images}
        yield row | {"id": f"{source.name}/{ids.add(row['id'])}", "source": source.name}


def _as_pair(row: dict, source: Source) -> dict:
    """As Data-Juicer has it; of a conversation, its one question and answer about one image."""
    if "conversations" not in row:
        return row
    turns, images = row["conversations"], images_of(row)
    if len(turns) != 2 or len(images) != 1:
        raise InputError(
            f"sources.{source.name}: row {row['id']!r} has {len(images)} images and {len(turns) // 2} questions, where "
            "pairs have one; give the source the split finetune"
        )
    question = turns[0]["value"].replace(IMAGE_TOKEN, "").strip()
    pair = {"id": row["id"], "text": text_of(turns[1]["value"]), "images": images}
    return pair | ({"question": question} if question else {})


def _as_conversation(row: dict, source: Source) -> dict:
    if "conversations" not in row:
        return conversation(row["id"], row["images"][0], row.get("question") or DESCRIBE, caption_of(row["text"]))
    if row["conversations"][0]["value"].strip() == IMAGE_TOKEN:
        first = {"from": "human", "value": f"{IMAGE_TOKEN}\n{DESCRIBE}"}
        return row | {"conversations": [first, *row["conversations"][1:]]}
    return row
