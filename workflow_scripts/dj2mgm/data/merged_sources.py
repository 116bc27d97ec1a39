"""Merge of several sources' rows into one dataset in the workflow's formats.

Each id and image path begins with the source's name and is therefore unique. The key `source` of each row holds this
name.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from dj2mgm.cli.messages import note
from dj2mgm.data.formats import (
    DJ_IMAGE_TOKEN,
    IMAGE_TOKEN,
    build_conversation,
    build_dj_text,
    extract_caption,
    list_images,
)
from dj2mgm.data.sources.image_folders import read_folder, read_webdataset
from dj2mgm.data.sources.parquet import read_arrow, read_parquet
from dj2mgm.data.sources.source import (
    Source,
    describe_unread,
    read_data_juicer,
    read_llava_files,
    read_sharegpt,
    read_table,
)
from dj2mgm.dataset_resolution.file_samples import SAVED_RECORDS
from dj2mgm.dataset_resolution.row_media import UNREAD_MEDIA
from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.data import CAPTION_QUESTION
from dj2mgm.settings.dataset_files import WITH_IMAGES, FilesDataset, MergedSplit, ReadableSources, SourceOnDisk
from dj2mgm.storage.files import find_files, list_files, write_json, write_jsonl
from dj2mgm.storage.image_files import CONVERT_HEIF, HEIF_SUFFIXES, IMAGE_FOLDERS_FILE, rebase_image_path
from dj2mgm.storage.streaming import NumberedIds

READERS: dict[str, Callable[[Source], Iterator[dict]]] = {
    "data_juicer": read_data_juicer,
    "llava": read_llava_files,
    "sharegpt": read_sharegpt,
    "table": read_table,
    "folder": read_folder,
    "webdataset": read_webdataset,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
PAIR_FORMATS = ("data_juicer",)  # readers of all other formats yield conversations
SHOWN_KINDS = 5


def write_merged_sources(dataset: ReadableSources, folder: Path, working: Path) -> tuple[FilesDataset, dict]:
    """Write the rows of each split to `working`, and the sources' image folders to `folder`.

    Args:
        dataset: the sources, and optionally a held-out split.
        folder: folder of the dataset; readers write into `images/<source>/` there.
        working: folder of temporary files.

    Returns:
        The merged files for `write_user_dataset`, and the counts of each source.
    """
    sources = dataset.sources
    shutil.rmtree(folder / "images", ignore_errors=True)  # from removed sources or other formats
    source_by_name = {
        name: Source(
            name,
            tuple(find_files(values.path, values.suffixes)),
            Path(values.images),
            values.columns,
            folder / "images" / name,
            values.uncaptioned == "keep",
        )
        for name, values in sources.items()
    }
    for name, values in sources.items():
        for file in source_by_name[name].files:
            _check_name(file)
        _count_unread_files(source_by_name[name], values)
    splits, counts = {}, {}
    for split in dict.fromkeys(values.split for values in sources.values()):
        row_counts: Counter = Counter()
        names = [name for name, values in sources.items() if values.split == split]
        file = working / f"{split}.jsonl"
        read = _read_conversations if split == "finetune" else _read_pairs
        write_jsonl(
            file, (row for name in names for row in read(source_by_name[name], sources[name].format, row_counts))
        )
        for name in names:
            source = source_by_name[name]
            if not row_counts[name]:
                reason = "no image with a caption" if source.uncaptioned.counts else "no rows"
                raise InputError(f"sources.{name}: {sources[name].path} has {reason}; add some, or remove the source")
            counts[name] = {"split": split, "rows": row_counts[name], "format": sources[name].format}
            if source.uncaptioned.counts:
                counts[name]["uncaptioned"] = source.uncaptioned.counts.total()
                counts[name]["uncaptioned_examples"] = source.uncaptioned.examples
                _note_uncaptioned(source, row_counts[name])
            if source.unread.counts:
                counts[name]["not_read"] = dict(sorted(source.unread.counts.items()))
                counts[name]["not_read_examples"] = source.unread.examples
                _note_unread(source, sources[name].format)
        splits[split] = MergedSplit(file=str(file), images=str(folder / IMAGE_FOLDERS_FILE), sources=names)
    folders = {  # relative if inside of the dataset's folder, so that a project can be moved
        name: f"images/{name}" if source.output.is_dir() else str(source.images.resolve())
        for name, source in source_by_name.items()
    }
    write_json(folder / IMAGE_FOLDERS_FILE, folders)
    return FilesDataset.model_construct(**{"evaluation": dataset.evaluation} | splits), counts


def _check_name(file: Path) -> None:
    """Raise InputError for a file whose name is not UTF-8, because ids and paths of rows are written as UTF-8."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise InputError(f"{file}: the name of the file or of its folder is not UTF-8; rename it") from None


def _count_unread_files(source: Source, values: SourceOnDisk) -> None:
    """Count the files in an image source's folder that are neither read nor captions of its images."""
    if values.format not in WITH_IMAGES or not Path(values.path).is_dir():
        return
    captions = [file.with_suffix(".txt") for file in source.files] if values.format == "folder" else []
    read = {*source.files, *captions}
    records = SAVED_RECORDS if values.format == "arrow" else ()
    for file in list_files(values.path):
        if file not in read and file.name not in records:
            source.unread.add(str(file))


def _note_unread(source: Source, format_name: str) -> None:
    counts = source.unread.counts
    kinds = describe_unread(counts.most_common(SHOWN_KINDS), format_name)
    more = ", …" if len(counts) > SHOWN_KINDS else ""
    remedy = f"; {CONVERT_HEIF}" if counts.keys() & set(HEIF_SUFFIXES) else ""
    note(
        f"sources.{source.name}: files that are not used: {counts.total()} ({kinds}{more}); the first is "
        f"{source.unread.examples[0]}{remedy}"
    )


def _note_uncaptioned(source: Source, row_count: int) -> None:
    count = source.uncaptioned.counts.total()
    if source.keep_uncaptioned:
        total, outcome, remedy = row_count, "kept for a captioner", "Recipes that require words drop them"
    else:
        total, outcome = row_count + count, "left out"
        remedy = "Write the captions to .txt files of the images' names, or let a captioner write them (docs/data.md)"
    note(
        f"sources.{source.name}: images without a caption: {count} of {total}, {outcome}; the first is "
        f"{source.uncaptioned.examples[0]}. {remedy}"
    )


def _read_pairs(source: Source, format_name: str, row_counts: Counter) -> Iterator[dict]:
    """Yield a source's rows in Data-Juicer's format; the source's format, not a row's keys, decides how to convert."""
    ids = NumberedIds("~")
    for row, file in _read_rows(source, format_name, row_counts):
        pair = row if format_name in PAIR_FORMATS else _convert_to_pair(row, source)
        if pair["text"].count(DJ_IMAGE_TOKEN) > 1:
            raise InputError(
                f"sources.{source.name}: the caption of row {quote_value(row['id'])} contains {DJ_IMAGE_TOKEN}, "
                "which stands for an image; remove it"
            )
        texts = {key: pair[key] for key in ("text", "question") if key in pair}
        images = _prefix_images(source, pair["images"], file)
        yield _build_identity(source, ids, row["id"]) | texts | {"images": images}


def _read_conversations(source: Source, format_name: str, row_counts: Counter) -> Iterator[dict]:
    """Yield a source's rows in LLaVA's format, without other keys: paths in them do not have the source's name."""
    ids = NumberedIds("~")
    for row, file in _read_rows(source, format_name, row_counts):
        conversation = _convert_to_conversation(row) if format_name in PAIR_FORMATS else _add_question(row)
        if images := _prefix_images(source, list_images(conversation), file):
            conversation |= {"image": images[0] if isinstance(conversation["image"], str) else images}
        media = {key: conversation[key] for key in ("image", UNREAD_MEDIA) if key in conversation}
        turns = [{"from": turn["from"], "value": turn["value"]} for turn in conversation["conversations"]]
        yield _build_identity(source, ids, row["id"]) | media | {"conversations": turns}


def _read_rows(source: Source, format_name: str, row_counts: Counter) -> Iterator[tuple[dict, Path]]:
    """Yield the rows, each with its file; with the first file if the format contains its images."""
    read = READERS[format_name]
    has_images = format_name in WITH_IMAGES
    for part in [source] if has_images else [replace(source, files=(file,)) for file in source.files]:
        for row in read(part):
            row_counts[source.name] += 1
            yield row, part.files[0]


def _build_identity(source: Source, ids: NumberedIds, identifier: str) -> dict:
    return {"id": f"{source.name}/{ids.add(identifier)}", "source": source.name}


def _prefix_images(source: Source, images: list[str], file: Path) -> list[str]:
    return [f"{source.name}/{rebase_image_path(image, file, source.images)}" for image in images]


def _convert_to_pair(row: dict, source: Source) -> dict:
    """Convert a conversation of one question and one answer about one image to a pair."""
    turns, images = row["conversations"], list_images(row)
    if unread := row.get(UNREAD_MEDIA):
        raise InputError(
            f"sources.{source.name}: row {quote_value(row['id'])}: {unread}; correct the row, or delete it"
        )
    if not images and "image" in row:  # null: the filters drop and count the row
        images = [""]
    if len(turns) != 2 or len(images) != 1:
        raise InputError(
            f"sources.{source.name}: row {quote_value(row['id'])} has {len(images)} images and {len(turns) // 2} "
            "questions, but a pair has one of each; set `split: finetune` for this source"
        )
    question = turns[0]["value"].replace(IMAGE_TOKEN, "").strip()
    pair = {"id": row["id"], "text": build_dj_text(turns[1]["value"]), "images": images}
    return pair | ({"question": question} if question else {})


def _convert_to_conversation(row: dict) -> dict:
    """Convert a pair to a conversation with the pair's question or, without one, a request for the caption."""
    return build_conversation(
        row["id"], row["images"][0], row.get("question") or CAPTION_QUESTION, extract_caption(row["text"])
    )


def _add_question(row: dict) -> dict:
    """Add a request for the caption if the first turn has only an image."""
    if row["conversations"][0]["value"].strip() == IMAGE_TOKEN:
        first = {"from": "human", "value": f"{IMAGE_TOKEN}\n{CAPTION_QUESTION}"}
        return row | {"conversations": [first, *row["conversations"][1:]]}
    return row
