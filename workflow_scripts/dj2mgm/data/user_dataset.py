"""Someone's own dataset in the workflow's three files: pairs, instructions, a held-out split.

Without a held-out split, one is made by taking images away from the pairs. No held-out image is trained on: whatever is
said about it, or about a copy of it, is left out of pairs and instructions. Data-Juicer's caption rows have lost the
questions that a LLaVA file had; where that file is there too, each row gets its question back. However many rows there
are, they are never held at once.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path

from dj2mgm.data.formats import IMAGE_TOKEN, extract_caption, list_images, read_evaluation, read_llava, read_pairs
from dj2mgm.data.held_out_images import HeldOutImages
from dj2mgm.data.images import BadImage, UnreadableImages, absolute_path, load_image, locate_image
from dj2mgm.data.shards import compute_digest
from dj2mgm.errors import InputError
from dj2mgm.files import write_json_list, write_jsonl
from dj2mgm.streaming import DiskMap

HELD_OUT_SHARE = 0.1
MAX_HELD_OUT = 500
MAX_REFERENCES = 50  # of one image: no published benchmark has more
LEAST = 2  # each image's control is another image


def write_user_dataset(settings: dict, output_dir: Path) -> dict:
    """Validate what is there, make what is missing, write pretrain.jsonl, finetune.json, evaluation.jsonl.

    Without instructions finetune.json is an empty list: stage 2 then asks for the captions that stage 1 trains on,
    which are known only when they are filtered (`write_jsonl.py`).

    Args:
        settings: `pretrain`, perhaps `finetune` and `evaluation`, each {file, images}; `pretrain` perhaps with
            `questions` (config/datasets/<name>.yaml). `called` is how messages name the rows, if not by their file.

    Returns:
        Rows written, by split; under `left_out` how many there are about held-out images, and under `left_out_copies`
        how many of these name another file with the same bytes.

    Raises:
        InputError: names the file, the row and the remedy.
    """
    source, images = settings["pretrain"]["file"], settings["pretrain"]["images"]
    instructions = settings.get("finetune")
    if instructions and next(read_llava(instructions["file"], number_ids=True), None) is None:
        raise InputError(f"{instructions['file']} holds no rows; add some, or leave it out to ask for the captions")
    evaluation, held_out = _evaluation_split(settings)
    apart = _HeldOutFilter(held_out)

    pairs = apart.rows("pretrain", read_pairs(source), images, lambda row: row["images"])
    if "questions" in settings["pretrain"]:
        pairs = restore_questions(pairs, settings["pretrain"]["questions"])
    counts = {"pretrain": write_jsonl(output_dir / "pretrain.jsonl", pairs)}
    conversations: Iterable[dict] = ()
    if instructions:
        rows = read_llava(instructions["file"], number_ids=True)
        conversations = apart.rows("finetune", rows, instructions["images"], list_images)
    counts["finetune"] = write_json_list(output_dir / "finetune.json", conversations)
    for split, files in (("pretrain", settings["pretrain"]), ("finetune", instructions)):
        if files and not counts[split]:
            raise InputError(
                f"{_called(files)}: all its images are held out for evaluation; add images, or an evaluation file "
                "with other images"
            )
    counts["evaluation"] = write_jsonl(output_dir / "evaluation.jsonl", evaluation)
    return counts | {"left_out": dict(apart.left_out), "left_out_copies": dict(apart.copies)}


class _HeldOutFilter:
    """Leaves out rows about held-out images and counts them, by split."""

    def __init__(self, held_out: HeldOutImages):
        self.held_out = held_out
        self.match = lru_cache(maxsize=1024)(self._match)  # rows about an image tend to follow each other
        self.left_out: Counter = Counter()
        self.copies: Counter = Counter()

    def rows(
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
        except (BadImage, OSError):  # a later stage drops the row and says why
            return None


def _evaluation_split(settings: dict) -> tuple[Iterable[dict], HeldOutImages]:
    """Evaluation rows, brought or held out, and their images."""
    source, root = settings["pretrain"]["file"], settings["pretrain"]["images"]
    if not (images := count_images(source)):
        raise InputError(f"{_called(settings['pretrain'])} holds no rows")
    if "evaluation" in settings:
        file = settings["evaluation"]["file"]
        held_out = HeldOutImages(read_with_images(**settings["evaluation"]), settings["evaluation"]["images"])
        if len(held_out) < LEAST:
            raise InputError(f"{file} has {len(held_out)} different images; at least {LEAST} are needed")
        return read_evaluation(file), held_out
    unreadable = UnreadableImages()
    evaluation = hold_out(source, root, images, unreadable)
    if len(evaluation) < LEAST:
        if unreadable.reasons:
            raise InputError(
                f"{_called(settings['pretrain'])}: too few readable images to hold {LEAST} out for evaluation "
                f"({len(evaluation)} readable, {unreadable}); correct the paths, or `images`, the folder that they are "
                "relative to"
            )
        raise InputError(
            f"{_called(settings['pretrain'])}: too few different, readable images to hold {LEAST} out for evaluation; "
            "add some, or an evaluation file"
        )
    return evaluation, HeldOutImages(evaluation, root)


def _called(split: dict) -> str:
    """What a person knows the rows by: their file, or the sources that they come from."""
    return split.get("called", split["file"])


def restore_questions(pairs: Iterator[dict], original: str) -> Iterator[dict]:
    """The pairs with the `question` that the LLaVA row of the same id begins with.

    Raises:
        InputError: a pair that the LLaVA file does not have.
    """
    questions = DiskMap()
    questions.fill(
        (row["id"], row["conversations"][0]["value"].replace(IMAGE_TOKEN, "").strip()) for row in read_llava(original)
    )
    for row in pairs:
        whole = row["id"].rpartition("~")[0]  # of a row of several images
        question = questions.get(row["id"])
        if question is None and (question := questions.get(whole) if whole else None) is None:
            raise InputError(
                f"{original} has no row with the id {row['id']!r} of a pair; leave `questions` out, or add it"
            )
        yield row | {"question": question}


def count_images(source: str) -> int:
    """How many different images the pairs have; validates the pairs."""
    seen = DiskMap()
    return sum(seen.setdefault(_name(row), number) == number for number, row in enumerate(read_pairs(source)))


def hold_out(source: str, root: str, images: int, unreadable: UnreadableImages) -> list[dict]:
    """A tenth of the `images` at random (always the same), at most 500, that can be read; as evaluation rows, each with
    the captions of its image, at most 50. No two hold the same bytes.

    Each image draws a number, and the highest are kept: the others are not opened.

    Args:
        unreadable: counts the rows whose image was opened in vain.
    """
    wanted = min(MAX_HELD_OUT, max(LEAST, round(HELD_OUT_SHARE * images)))
    heap: list[tuple[float, str]] = []  # the lowest number first
    contents: dict[str, str] = {}  # of the images in the heap
    for row in read_pairs(source):
        name = _name(row)
        drawn = random.Random(name).random(), name
        if name in contents or (len(heap) == wanted and drawn < heap[0]) or not extract_caption(row["text"]):
            continue
        content = _content(root, row["images"][0], unreadable)
        if content is None or content in contents.values():
            continue
        heappush(heap, drawn)
        contents[name] = content
        if len(heap) > wanted:
            del contents[heappop(heap)[1]]
    rows: dict[str, dict] = {}
    for row in read_pairs(source):
        name = _name(row)
        if name in contents and (caption := extract_caption(row["text"])):
            image = rows.setdefault(name, {"id": row["id"], "image": row["images"][0], "captions": []})
            if len(image["captions"]) < MAX_REFERENCES:
                image["captions"].append(caption)
    return list(rows.values())


def _name(row: dict) -> str:
    return os.path.normpath(row["images"][0])


def _content(root: str, relative: str, unreadable: UnreadableImages) -> str | None:
    """Return a digest of an image's file; None if it cannot be read, which is counted."""
    try:
        path = locate_image(root, relative)
        load_image(path)
    except BadImage as error:
        unreadable.add(error.reason, absolute_path(root, relative))
        return None
    return compute_digest(path)


def read_with_images(file: str, images: str) -> Iterator[dict]:
    """Evaluation rows, whose images can be read.

    Raises:
        InputError: names the line.
    """
    for number, row in enumerate(read_evaluation(file), start=1):
        try:
            load_image(locate_image(images, row["image"]))
        except BadImage as error:
            raise InputError(f"{file}, line {number}: {error}; fix the image or delete the line") from None
        yield row
