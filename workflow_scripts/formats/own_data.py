"""Someone's own dataset in the workflow's three files: pairs, instructions, a held-out split.

What is missing is made from the pairs: the held-out split by taking images away, the instructions by asking for each
caption. No held-out image is trained on: whatever is said about it is left out of pairs and instructions. Data-Juicer's
caption rows have lost the questions that a LLaVA file had; where that file is there too, each row gets its question
back. However many rows there are, they are never held at once.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path

from disk_map import DiskMap
from errors import InputError
from files import read_jsonl, write_json_list, write_jsonl
from formats.dj_jsonl import caption_of, read_dj_jsonl
from formats.evaluation_jsonl import read_evaluation
from formats.images import BadImage, load_image, locate_image
from formats.llava import IMAGE_TOKEN, conversation, read_llava

HELD_OUT_SHARE = 0.1
HELD_OUT_MOST = 500
REFERENCES_MOST = 50  # of one image: no published benchmark has more
LEAST = 2  # each image's control is another image
DESCRIBE = "Describe the image."


def write_own_data(settings: dict, output_dir: Path) -> dict:
    """Validate what is there, make what is missing, write pretrain.jsonl, finetune.json, evaluation.jsonl.

    Args:
        settings: `pretrain`, perhaps `finetune` and `evaluation`, each {file, images}; `pretrain` perhaps with
            `questions` (config/datasets/<name>.yaml).

    Returns:
        Rows written, by split; under `left_out` how many there are about held-out images.

    Raises:
        InputError: names the file, the row and the remedy.
    """
    source, images = settings["pretrain"]["file"], settings["pretrain"]["images"]
    different = count_images(source)
    if not different:
        raise InputError(f"{source} holds no rows")
    if "evaluation" in settings:
        evaluation, held_out = read_with_images(**settings["evaluation"]), set()
    else:
        evaluation = hold_out(source, images, different)
        held_out = {_path(images, row["image"]) for row in evaluation}
        if len(evaluation) < LEAST:
            raise InputError(f"{source}: too few readable images to hold some out for evaluation")
    counts, left_out = {}, Counter()

    def trained_on(split: str, root: str, image: str | None) -> bool:
        held = image is not None and _path(root, image) in held_out
        left_out[split] += held
        return not held

    pairs = (row for row in read_jsonl(source) if trained_on("pretrain", images, row["images"][0]))
    if "questions" in settings["pretrain"]:
        pairs = restore_questions(pairs, settings["pretrain"]["questions"])
    counts["pretrain"] = write_jsonl(output_dir / "pretrain.jsonl", pairs)
    if not counts["pretrain"]:
        raise InputError(f"{source}: all its images are held out for evaluation; add images, or an evaluation file")
    if "finetune" in settings:
        rows, root = read_llava(settings["finetune"]["file"], number_ids=True), settings["finetune"]["images"]
        instructions = (row for row in rows if trained_on("finetune", root, row.get("image")))
    else:
        written = read_jsonl(output_dir / "pretrain.jsonl")
        instructions = (conversation(r["id"], r["images"][0], DESCRIBE, caption_of(r["text"])) for r in written)
    counts["finetune"] = write_json_list(output_dir / "finetune.json", instructions)
    counts["evaluation"] = write_jsonl(output_dir / "evaluation.jsonl", evaluation)
    if counts["evaluation"] < LEAST:
        raise InputError(
            f"{settings['evaluation']['file']} has {counts['evaluation']} rows; at least {LEAST} are needed"
        )
    return counts | {"left_out": dict(+left_out)}


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
        if (question := questions.get(row["id"])) is None:
            raise InputError(
                f"{original} has no row with the id {row['id']!r} of a pair; leave `questions` out, or add it"
            )
        yield row | {"question": question}


def count_images(source: str) -> int:
    """How many different images the pairs have; validates the pairs."""
    seen = DiskMap()
    return sum(seen.setdefault(_name(row), number) == number for number, row in enumerate(read_dj_jsonl(source)))


def hold_out(source: str, root: str, images: int) -> list[dict]:
    """A tenth of the `images` at random (always the same), at most 500, that can be read; as evaluation rows, each with
    the captions of its image, at most 50.

    Each image draws a number, and the highest are kept: the others are not opened.
    """
    wanted = min(HELD_OUT_MOST, max(LEAST, round(HELD_OUT_SHARE * images)))
    heap: list[tuple[float, str]] = []  # the lowest number first
    for row in read_jsonl(source):
        name = _name(row)
        drawn = random.Random(name).random(), name
        if (len(heap) == wanted and drawn < heap[0]) or drawn in heap:
            continue
        if caption_of(row["text"]) and _readable(root, row["images"][0]):
            heappush(heap, drawn)
            if len(heap) > wanted:
                heappop(heap)
    chosen, rows = {image for _, image in heap}, {}
    for row in read_jsonl(source):
        name = _name(row)
        if name in chosen and (caption := caption_of(row["text"])):
            found = rows.setdefault(name, {"id": row["id"], "image": row["images"][0], "captions": []})
            if len(found["captions"]) < REFERENCES_MOST:
                found["captions"].append(caption)
    return list(rows.values())


def _name(row: dict) -> str:
    return os.path.normpath(row["images"][0])


def _path(root: str, relative: str) -> str:
    """Where an image is, whatever links lead to its folder."""
    folder, name = os.path.split(os.path.join(root, relative))
    return os.path.join(_real(folder), name)


@lru_cache(maxsize=1024)
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def read_with_images(file: str, images: str) -> Iterator[dict]:
    """Evaluation rows, whose images can be read.

    Raises:
        InputError: names the line.
    """
    for number, row in enumerate(read_evaluation(file), start=1):
        try:
            load_image(locate_image(images, row["image"]))
        except BadImage as error:
            raise InputError(f"{file}, line {number}: {error}; mend the image or delete the line") from None
        yield row


def _readable(root: str, relative: str) -> bool:
    try:
        load_image(locate_image(root, relative))
    except BadImage:
        return False
    return True
