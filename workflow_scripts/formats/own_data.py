"""Someone's own dataset in the workflow's three files: pairs, instructions, a held-out split.

What is missing is made from the pairs: the held-out split by taking pairs away (they are then not trained on), the
instructions by asking for each caption. Data-Juicer's caption rows have lost the questions that a LLaVA file had; where
that file is there too, each row gets its question back. However many rows there are, they are never held at once.
"""

import random
from collections.abc import Iterator
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
DESCRIBE = "Describe the image."


def write_own_data(settings: dict, output_dir: Path) -> dict:
    """Validate what is there, make what is missing, write pretrain.jsonl, finetune.json, evaluation.jsonl.

    Args:
        settings: `pretrain`, perhaps `finetune` and `evaluation`, each {file, images}; `pretrain` perhaps with
            `questions` (config/datasets/<name>.yaml).

    Raises:
        InputError: names the file, the row and the remedy.
    """
    source = settings["pretrain"]["file"]
    rows = sum(1 for _ in read_dj_jsonl(source))
    if not rows:
        raise InputError(f"{source} holds no rows")
    if "evaluation" in settings:
        evaluation, held_out = read_evaluation(settings["evaluation"]["file"]), set()
    else:
        evaluation = hold_out(source, rows, settings["pretrain"]["images"])
        held_out = {row["id"] for row in evaluation}
        if len(evaluation) < 2:
            raise InputError(f"{source}: too few readable images to hold some out for evaluation")
    pairs = (row for row in read_jsonl(source) if row["id"] not in held_out)
    if "questions" in settings["pretrain"]:
        pairs = restore_questions(pairs, settings["pretrain"]["questions"])
    counts = {"pretrain": write_jsonl(output_dir / "pretrain.jsonl", pairs)}
    if "finetune" in settings:
        instructions = read_llava(settings["finetune"]["file"], number_ids=True)
    else:
        written = read_jsonl(output_dir / "pretrain.jsonl")
        instructions = (conversation(r["id"], r["images"][0], DESCRIBE, caption_of(r["text"])) for r in written)
    counts["finetune"] = write_json_list(output_dir / "finetune.json", instructions)
    return counts | {"evaluation": write_jsonl(output_dir / "evaluation.jsonl", evaluation)}


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


def hold_out(source: str, rows: int, images: str) -> list[dict]:
    """A tenth of the pairs at random (always the same), at most 500, whose images can be read; as evaluation rows.

    Each row draws a number, and the highest are kept: images of the others are not opened.
    """
    wanted = min(HELD_OUT_MOST, max(2, round(HELD_OUT_SHARE * rows)))
    draw = random.Random(0).random
    kept: list[tuple[float, int, dict]] = []  # a heap: the lowest number first
    for index, row in enumerate(read_jsonl(source)):
        number, caption = draw(), caption_of(row["text"])
        if len(kept) == wanted and number < kept[0][0]:
            continue
        if caption and _readable(images, row["images"][0]):
            heappush(kept, (number, index, {"id": row["id"], "image": row["images"][0], "captions": [caption]}))
            if len(kept) > wanted:
                heappop(kept)
    return [row for _, _, row in sorted(kept, key=lambda item: item[1])]


def _readable(root: str, relative: str) -> bool:
    try:
        load_image(locate_image(root, relative))
    except BadImage:
        return False
    return True
