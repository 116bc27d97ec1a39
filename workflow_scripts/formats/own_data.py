"""Someone's own dataset in the workflow's three files: pairs, instructions, a held-out split.

What is missing is made from the pairs: the held-out split by taking pairs away (they are then not trained on), the
instructions by asking for each caption. Data-Juicer's caption rows have lost the questions that a LLaVA file had; where
that file is there too, each row gets its question back.
"""

import random
from pathlib import Path

from errors import InputError
from files import write_json, write_jsonl
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
    pairs = list(read_dj_jsonl(settings["pretrain"]["file"]))
    if not pairs:
        raise InputError(f"{settings['pretrain']['file']} holds no rows")
    if "questions" in settings["pretrain"]:
        pairs = restore_questions(pairs, settings["pretrain"]["questions"])
    if "evaluation" in settings:
        evaluation, held_out = list(read_evaluation(settings["evaluation"]["file"])), set()
    else:
        evaluation = hold_out(pairs, settings["pretrain"]["images"])
        held_out = {row["id"] for row in evaluation}
        if len(evaluation) < 2:
            raise InputError(f"{settings['pretrain']['file']}: too few readable images to hold some out for evaluation")
    pairs = [row for row in pairs if row["id"] not in held_out]
    if "finetune" in settings:
        instructions = list(read_llava(settings["finetune"]["file"], number_ids=True))
    else:
        instructions = [conversation(r["id"], r["images"][0], DESCRIBE, caption_of(r["text"])) for r in pairs]

    write_json(output_dir / "finetune.json", instructions)
    write_jsonl(output_dir / "evaluation.jsonl", evaluation)
    write_jsonl(output_dir / "pretrain.jsonl", pairs)
    return {"pretrain": len(pairs), "finetune": len(instructions), "evaluation": len(evaluation)}


def restore_questions(pairs: list[dict], original: str) -> list[dict]:
    """The pairs with the `question` that the LLaVA row of the same id begins with.

    Raises:
        InputError: a pair that the LLaVA file does not have.
    """
    questions = {
        row["id"]: row["conversations"][0]["value"].replace(IMAGE_TOKEN, "").strip() for row in read_llava(original)
    }
    for row in pairs:
        if row["id"] not in questions:
            raise InputError(
                f"{original} has no row with the id {row['id']!r} of a pair; leave `questions` out, or add it"
            )
    return [row | {"question": questions[row["id"]]} for row in pairs]


def hold_out(pairs: list[dict], images: str) -> list[dict]:
    """A tenth of the pairs at random (always the same), at most 500, whose images can be read; as evaluation rows."""
    wanted = min(HELD_OUT_MOST, max(2, round(HELD_OUT_SHARE * len(pairs))))
    order = list(range(len(pairs)))
    random.Random(0).shuffle(order)
    chosen = []
    for index in order:
        row = pairs[index]
        caption = caption_of(row["text"])
        if len(chosen) < wanted and caption and _readable(images, row["images"][0]):
            chosen.append((index, {"id": row["id"], "image": row["images"][0], "captions": [caption]}))
    return [row for _, row in sorted(chosen, key=lambda item: item[0])]


def _readable(root: str, relative: str) -> bool:
    try:
        load_image(locate_image(root, relative))
    except BadImage:
        return False
    return True
