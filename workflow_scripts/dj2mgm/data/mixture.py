"""A dataset of several sources: their rows in the workflow's formats, one after the other.

Ids and image paths begin with the source's name, so that no two sources share one, and each row says its `source`.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from dj2mgm.data.formats import (
    DESCRIBE,
    DJ_IMAGE_TOKEN,
    IMAGE_TOKEN,
    build_conversation,
    build_dj_text,
    extract_caption,
    list_images,
)
from dj2mgm.data.rows import NumberedIds
from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError
from dj2mgm.files import SOURCES, WITH_IMAGES, files_at, files_below, write_json, write_jsonl
from dj2mgm.messages import note

PAIR_FORMATS = ("data_juicer",)  # of config/datasets.py; readers of all other formats yield conversations
HEIF = {".heic", ".heif", ".hif"}
SHOWN_KINDS = 5


def write_mixture(sources: dict[str, dict], folder: Path, working: Path) -> tuple[dict, dict]:
    """Write the rows of each split to `working`, and the sources' image folders to `folder`.

    Args:
        sources: as config/datasets.py resolves them, by name.
        folder: the dataset's own; what readers have to write is in `images/<source>/` there.

    Returns:
        `{split: {file, images, called}}` for `write_user_dataset`, and by source what was read.

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
    for name, values in sources.items():
        _find_unread(described[name], values)
    splits, counts = {}, {}
    for split in dict.fromkeys(values["split"] for values in sources.values()):
        rows: Counter = Counter()
        names = [name for name, values in sources.items() if values["split"] == split]
        file = working / f"{split}.jsonl"
        read = _pairs if split == "pretrain" else _conversations
        write_jsonl(file, (row for name in names for row in read(described[name], sources[name]["format"], rows)))
        for name in names:
            if not rows[name]:
                raise InputError(f"sources.{name}: {sources[name]['path']} holds no rows; add some, or take it out")
            counts[name] = {"split": split, "rows": rows[name], "format": sources[name]["format"]}
            if described[name].not_read.counts:
                counts[name]["not_read"] = dict(sorted(described[name].not_read.counts.items()))
                _say_unread(described[name])
        splits[split] = {"file": str(file), "images": str(folder / SOURCES), "called": f"sources {', '.join(names)}"}
    folders = {  # a project may be moved, with what it holds itself
        name: f"images/{name}" if source.own.is_dir() else str(source.images.resolve())
        for name, source in described.items()
    }
    write_json(folder / SOURCES, folders)
    return splits, counts


def _find_unread(source: Source, values: dict) -> None:
    """Count the files below the folder of a source with images that are neither its own nor captions of its images."""
    if values["format"] not in WITH_IMAGES or not Path(values["path"]).is_dir():
        return
    captions = {file.with_suffix(".txt") for file in source.files} if values["format"] == "folder" else set()
    for file in files_below(values["path"]):
        if file.suffix.lower() not in values["suffixes"] and file not in captions:
            source.not_read.add(str(file))


def _say_unread(source: Source) -> None:
    counts = source.not_read.counts
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(SHOWN_KINDS))
    more = ", …" if len(counts) > SHOWN_KINDS else ""
    remedy = "; convert .heic and .heif to JPEG: Pillow cannot read them" if HEIF.intersection(counts) else ""
    note(
        f"sources.{source.name}: {counts.total()} files are not read ({kinds}{more}), the first is "
        f"{source.not_read.first}{remedy}"
    )


def _pairs(source: Source, kind: str, rows: Counter) -> Iterator[dict]:
    """Yield a source's rows as Data-Juicer has them; the source's format alone says what a row is, not its keys."""
    ids = NumberedIds("~")
    for row in _read(source, kind, rows):
        pair = row if kind in PAIR_FORMATS else _as_pair(row, source)
        if pair["text"].count(DJ_IMAGE_TOKEN) > 1:
            raise InputError(
                f"sources.{source.name}: the caption of row {row['id']!r} holds {DJ_IMAGE_TOKEN}, which stands for an "
                "image; take it out"
            )
        yield pair | _named(source, ids, row["id"]) | {"images": _below(source, pair["images"])}


def _conversations(source: Source, kind: str, rows: Counter) -> Iterator[dict]:
    """Yield a source's rows as LLaVA has them."""
    ids = NumberedIds("~")
    for row in _read(source, kind, rows):
        said = _of_pair(row) if kind in PAIR_FORMATS else _asked(row)
        if images := _below(source, list_images(said)):
            said = said | {"image": images[0] if isinstance(said["image"], str) else images}
        yield said | _named(source, ids, row["id"])


def _read(source: Source, kind: str, rows: Counter) -> Iterator[dict]:
    for row in import_module(f"dj2mgm.data.sources.{kind}").read(source):
        rows[source.name] += 1
        yield row


def _named(source: Source, ids: NumberedIds, identifier: str) -> dict:
    return {"id": f"{source.name}/{ids.add(identifier)}", "source": source.name}


def _below(source: Source, images: list[str]) -> list[str]:
    return [f"{source.name}/{image}" for image in images]


def _as_pair(row: dict, source: Source) -> dict:
    """Return a conversation's one question and answer about one image as a pair."""
    turns, images = row["conversations"], list_images(row)
    if len(turns) != 2 or len(images) != 1:
        raise InputError(
            f"sources.{source.name}: row {row['id']!r} has {len(images)} images and {len(turns) // 2} questions, where "
            "pairs have one; give the source the split finetune"
        )
    question = turns[0]["value"].replace(IMAGE_TOKEN, "").strip()
    pair = {"id": row["id"], "text": build_dj_text(turns[1]["value"]), "images": images}
    return pair | ({"question": question} if question else {})


def _of_pair(row: dict) -> dict:
    """Return a pair as a conversation, which asks the pair's question or for its caption."""
    return build_conversation(
        row["id"], row["images"][0], row.get("question") or DESCRIBE, extract_caption(row["text"])
    )


def _asked(row: dict) -> dict:
    """Return a conversation that asks for the caption where its first turn is an image alone."""
    if row["conversations"][0]["value"].strip() == IMAGE_TOKEN:
        first = {"from": "human", "value": f"{IMAGE_TOKEN}\n{DESCRIBE}"}
        return row | {"conversations": [first, *row["conversations"][1:]]}
    return row
