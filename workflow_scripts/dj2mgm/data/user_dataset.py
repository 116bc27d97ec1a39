"""Conversion of a user's dataset to the workflow's three files: pairs, instructions, a held-out split.

If the user has no held-out split, some of the pairs' images are held out. Held-out images are never trained on.
Rows about them or their copies are left out of pairs and instructions. Caption rows that Data-Juicer converted from a
LLaVA file lack its questions. If the user names that file too, each row gets its question back. Rows are never in
memory all at once.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path

from dj2mgm.data.formats import IMAGE_TOKEN, extract_caption, list_images, read_evaluation, read_llava, read_pairs
from dj2mgm.data.images import (
    BadImageError,
    HeldOutImages,
    UnreadableImages,
    is_heif,
    join_image_path,
    load_image,
    locate_image,
)
from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.dataset_files import MAX_HELD_OUT, FilesDataset, MergedSplit, PretrainSplit
from dj2mgm.settings.string_formats import find_control_character
from dj2mgm.storage.files import write_json_list, write_jsonl
from dj2mgm.storage.image_files import CONVERT_RENAMED_HEIF, advise_unpacking_images, compute_image_digest
from dj2mgm.storage.streaming import DiskMap

HELD_OUT_FRACTION = 0.1
SPARE_IMAGES = 0.1  # share of further images that are opened to hold images out
MAX_REFERENCES = 50  # captions per image; no published benchmark has more
MIN_HELD_OUT = 2  # each image is also scored with another one, as a control


def write_user_dataset(settings: FilesDataset, output_dir: Path) -> dict:
    """Validate the given files, make the missing ones, write pretrain.jsonl, finetune.json and evaluation.jsonl.

    Without instructions finetune.json is an empty list. Stage 2 then trains on the captions of stage 1,
    which are known only after filtering (`write_jsonl.py`).

    Returns:
        Numbers of rows by split. `left_out` counts all rows about held-out images, and `left_out_copies` the rows
        among them whose image is a copy with another path.
    """
    pretrain, instructions = settings.pretrain, settings.finetune
    if instructions and next(read_llava(instructions.file, number_ids=True), None) is None:
        raise InputError(f"{instructions.file} has no rows; add some, or leave the file out to train on the captions")
    evaluation, held_out = _choose_evaluation(settings)
    held_out_filter = _HeldOutFilter(held_out)

    pairs = held_out_filter.filter("pretrain", read_pairs(pretrain.file), pretrain.images, lambda row: row["images"])
    if pretrain.questions:
        pairs = restore_questions(pairs, pretrain.questions)
    counts = {"pretrain": write_jsonl(output_dir / "pretrain.jsonl", pairs)}
    conversations: Iterable[dict] = ()
    if instructions:
        rows = read_llava(instructions.file, number_ids=True)
        conversations = held_out_filter.filter("finetune", rows, instructions.images, list_images)
    counts["finetune"] = write_json_list(output_dir / "finetune.json", conversations)
    for split, files in settings.splits.items():
        if counts.get(split) == 0:
            raise InputError(
                f"{files.title}: all its images are held out for evaluation; add images, or an evaluation "
                "file with other images"
            )
    counts["evaluation"] = write_jsonl(output_dir / "evaluation.jsonl", evaluation)
    return counts | {"left_out": dict(held_out_filter.left_out), "left_out_copies": dict(held_out_filter.copies)}


class _HeldOutFilter:
    """Filter that drops rows about held-out images and counts them by split."""

    def __init__(self, held_out: HeldOutImages):
        self.held_out = held_out
        self.match = lru_cache(maxsize=1024)(self._match)  # rows about the same image tend to be neighbors
        self.left_out: Counter = Counter()
        self.copies: Counter = Counter()

    def filter(
        self, split: str, rows: Iterable[dict], root: str, images_of_row: Callable[[dict], list[str]]
    ) -> Iterator[dict]:
        for row in rows:
            matches = {self.match(root, image) for image in images_of_row(row)} - {None}
            if not matches:
                yield row
                continue
            self.left_out[split] += 1
            if matches == {"copy"}:
                self.copies[split] += 1

    def _match(self, root: str, image: str) -> str | None:
        try:
            return self.held_out.match(locate_image(root, image))
        except (BadImageError, OSError):  # a later stage drops the row and names the reason
            return None


def _choose_evaluation(settings: FilesDataset) -> tuple[Iterable[dict], HeldOutImages]:
    """Return the evaluation rows, from the user's file or selected from the pairs, and their images."""
    pairs, evaluation = settings.pretrain, settings.evaluation
    if next(read_pairs(pairs.file), None) is None:
        raise InputError(f"{pairs.title} has no rows")
    if isinstance(evaluation, MergedSplit):
        return _select_split(evaluation, 1)
    if evaluation:
        held_out = HeldOutImages(read_checked_evaluation(evaluation.file, evaluation.images), evaluation.images)
        if len(held_out) < MIN_HELD_OUT:
            raise InputError(
                f"{evaluation.file} has {len(held_out)} different images; at least {MIN_HELD_OUT} are needed"
            )
        return read_evaluation(evaluation.file), held_out
    return _select_split(pairs, HELD_OUT_FRACTION)


def _select_split(pairs: PretrainSplit, share: float) -> tuple[list[dict], HeldOutImages]:
    """Return evaluation rows about a share of the images of pairs, and these images."""
    images, numbers = validate_and_number_images(pairs.file)
    size = min(MAX_HELD_OUT, max(MIN_HELD_OUT, round(share * images)))
    tried = _add_spare_images(size)  # then all images, if too many of them are copies or cannot be read
    for lowest in [*numbers[tried - 1 : tried], 0.0]:
        unreadable = UnreadableImages()
        evaluation = select_held_out(pairs.file, pairs.images, size, unreadable, lowest)
        if len(evaluation) == size:
            break
    if len(evaluation) < MIN_HELD_OUT:
        if unreadable.reasons:
            remedy = advise_unpacking_images(Path(unreadable.first)) or (
                CONVERT_RENAMED_HEIF
                if is_heif(unreadable.first)
                else "correct the paths, or their base folder `images` or column in `columns` of the dataset's file in "
                "config/datasets/, whose lines a dry run (-n) prints"
            )
            raise InputError(
                f"{pairs.title}: only {len(evaluation)} of {images} images can be read ({unreadable}), and at least "
                f"{MIN_HELD_OUT} must be held out for evaluation; {remedy}"
            )
        raise InputError(
            f"{pairs.title}: too few different, readable images to hold {MIN_HELD_OUT} out "
            "for evaluation; add some, or an evaluation file"
        )
    return evaluation, HeldOutImages(evaluation, pairs.images)


def restore_questions(pairs: Iterator[dict], original: str) -> Iterator[dict]:
    """Yield the pairs with the first question of the LLaVA row of the same id."""
    questions = DiskMap()
    questions.fill(
        (row["id"], row["conversations"][0]["value"].replace(IMAGE_TOKEN, "").strip()) for row in read_llava(original)
    )
    for row in pairs:
        source_id = row["id"].rpartition("~")[0]  # an id of one of several images is `<id of the row>~<number>`
        question = questions.get(row["id"])
        if question is None and (question := questions.get(source_id) if source_id else None) is None:
            raise InputError(
                f"{original} has no row with the id {quote_value(row['id'])} of a pair; add it, or leave "
                "`questions` out"
            )
        yield row | {"question": question}


def validate_and_number_images(source: str) -> tuple[int, list[float]]:
    """Validate the pairs; return the number of different images, and their highest random numbers in falling order."""
    first_rows = DiskMap()  # number of the first row of each image; first occurrences are counted
    images, numbers = 0, []
    for row_number, row in enumerate(read_pairs(source)):
        name = _normalize_path(row)
        if first_rows.setdefault(name, row_number) == row_number:
            images += 1
            heappush(numbers, _draw_number(name))
            if len(numbers) > _add_spare_images(MAX_HELD_OUT):
                heappop(numbers)
    return images, sorted(numbers, reverse=True)


def select_held_out(source: str, root: str, size: int, unreadable: UnreadableImages, lowest: float = 0.0) -> list[dict]:
    """Select readable images as evaluation rows, in a fixed pseudo-random order.

    Each row has the captions of its image, at most MAX_REFERENCES. No two rows have images with the same bytes. Each
    image gets a random number, and the images with the highest numbers are selected. Images whose number is too low
    are not opened.

    Args:
        source: file of pairs.
        root: the folder that image paths are relative to.
        size: number of images to select; the result is shorter if there are fewer.
        unreadable: counter of rows whose image was opened and could not be read.
        lowest: images with lower numbers are left out, so that few images are opened that are not selected.
    """
    heap: list[tuple[float, str]] = []  # lowest number first
    contents: dict[str, str] = {}  # digests of the images in the heap
    rows: dict[str, dict] = {}
    for row in read_pairs(source):
        name = _normalize_path(row)
        if name in rows:
            if len(captions := rows[name]["captions"]) < MAX_REFERENCES and (caption := _read_reference(row)):
                captions.append(caption)
            continue
        sort_key = _draw_number(name), name
        is_low = sort_key[0] < lowest or (len(heap) == size and sort_key < heap[0])
        if is_low or not (caption := _read_reference(row)):
            continue
        content = _digest_readable(root, row["images"][0], unreadable)
        if content is None or content in contents.values():
            continue
        heappush(heap, sort_key)
        contents[name] = content
        rows[name] = {"id": row["id"], "image": row["images"][0], "captions": [caption], "objects": [], "questions": []}
        if len(heap) > size:
            _, removed = heappop(heap)
            del contents[removed], rows[removed]
    return list(rows.values())


def _add_spare_images(size: int) -> int:
    return size + math.ceil(SPARE_IMAGES * size)


def _draw_number(name: str) -> float:
    """Return the random number of an image, from 0 to 1."""
    return random.Random(name).random()


def _read_reference(row: dict) -> str:
    """Return the caption of a pair as a reference; "" for one that is not trained on, either."""
    caption = extract_caption(row["text"])
    return "" if find_control_character(caption) else caption


def _normalize_path(row: dict) -> str:
    return os.path.normpath(row["images"][0])


def _digest_readable(root: str, relative: str, unreadable: UnreadableImages) -> str | None:
    """Return a digest of an image's file; if the image cannot be read, count it and return None."""
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImageError as error:
        unreadable.add(error.reason, join_image_path(root, relative))
        return None
    return compute_image_digest(path)


def read_checked_evaluation(file: str, images: str) -> Iterator[dict]:
    """Yield evaluation rows, each after its image was read without an error."""
    for number, row in enumerate(read_evaluation(file), start=1):
        try:
            load_image(locate_image(images, row["image"]))
        except BadImageError as error:
            raise InputError(f"{file}, line {number}: {error}; fix the image or delete the line") from None
        yield row
