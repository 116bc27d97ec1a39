"""Writer of the embedded dataset: three splits in the workflow's formats, planted faults, and the truth about them."""

import io
import random
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from dj2mgm.data import formats
from dj2mgm.data.shapes.scenes import (
    QUESTION_TYPES,
    Scene,
    describe_scene,
    draw_image,
    draw_question,
    draw_scene,
    draw_wrong_answer,
)
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import ShapesDataset
from dj2mgm.storage.files import write_json_list, write_jsonl

# Faults planted into clean image–caption pairs. Each kind is a function that turns image bytes and caption into what a
# crawl could have delivered; `FaultRates` describes the kinds.


def encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def draw_mismatched_caption(scene: Scene, rng: random.Random) -> str:
    """Return the caption of another scene, which is not true of this scene or of some of its objects."""
    attributes = [item.attributes for item in scene.objects]
    while True:
        other = draw_scene(rng)
        if not all(item.attributes in attributes for item in other.objects):
            return describe_scene(other)


def draw_junk_caption(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        symbols = string.ascii_letters + string.digits + "#$%&*+/=@^~|<>[]{}"
        return "".join(rng.choice(symbols) for _ in range(rng.randint(30, 90)))
    if kind == 1:
        path = "/".join("".join(rng.choices(string.ascii_lowercase + string.digits, k=9)) for _ in range(4))
        return f"https://{path}.html?ref={rng.randrange(10**9)}"
    if kind == 2:
        return " ".join(
            [rng.choice(("BUY NOW", "click here", "free free", "sale %%%", "!!! ???"))] * rng.randint(20, 40)
        )
    return " ".join(f"{rng.randrange(10**6)}-{rng.randrange(100)}" for _ in range(rng.randint(6, 14)))


def draw_short_caption(rng: random.Random) -> str:
    return rng.choice(("img", "a", "photo", "IMG 0012", "jpg", "x y", "untitled", "thing"))


def shrink_image(image: Image.Image, rng: random.Random) -> Image.Image:
    side = rng.randint(6, 24)
    return image.resize((side, side), Image.Resampling.BOX)


def draw_strip(image: Image.Image, rng: random.Random) -> Image.Image:
    length = image.width * rng.randint(2, 3)
    width = round(length / rng.uniform(6, 12))
    size = (length, width) if rng.random() < 0.5 else (width, length)
    return image.resize(size, Image.Resampling.BOX)


def truncate_bytes(data: bytes) -> bytes:
    return data[: len(data) // 2]


def build_error_page(rng: random.Random) -> bytes:
    return f"<html><body><h1>404 Not Found</h1><p>request {rng.randrange(10**9)}</p></body></html>\n".encode()


# The three splits in the workflow's formats, and the truth about them.
#
# Each row has its own random generator, seeded by (seed, split, row), so the dataset is the same byte for byte in any
# order of writing.

QUESTIONS_PER_IMAGE = 3  # instructions per fine-tuning image


def make_row_rng(seed: int, split: str, index: int) -> random.Random:
    return random.Random(f"{seed}/{split}/{index}")


def draw_row_scene(seed: int, split: str, index: int) -> Scene:
    return draw_scene(make_row_rng(seed, split, index))


def write_shapes(spec: ShapesDataset, folder: Path) -> dict:
    """Write images, then the four files, into `folder`; return the counts."""
    for split in ("pretrain", "finetune", "evaluation"):
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
    faults = assign_faults(spec)
    pretrain, truth = _write_pretrain(spec, faults, folder)
    finetune, answers = _write_finetune(spec, folder)
    evaluation = list(_write_evaluation(spec, folder))

    write_jsonl(folder / "ground_truth.jsonl", truth)
    write_jsonl(folder / "true_answers.jsonl", answers)
    write_json_list(folder / "finetune.json", finetune)
    write_jsonl(folder / "evaluation.jsonl", evaluation)
    write_jsonl(folder / "pretrain.jsonl", pretrain)
    return {"pretrain": len(pretrain), "finetune": len(finetune), "evaluation": len(evaluation)}


def assign_faults(spec: ShapesDataset) -> list[str]:
    """Return the fault of each pretraining row, mostly "clean".

    The counts are exact, the order random. Row 0 is clean, because it has no earlier row to duplicate.
    """
    kinds = [kind for kind, rate in spec.fault_rates for _ in range(round(rate * spec.pretrain_pairs))]
    if len(kinds) >= spec.pretrain_pairs:
        raise InputError(
            f"fault_rates: {len(kinds)} of {spec.pretrain_pairs} pairs would be faulty, but at least one pair must be "
            "clean; lower the rates"
        )
    kinds += ["clean"] * (spec.pretrain_pairs - len(kinds))
    random.Random(f"{spec.seed}/faults").shuffle(kinds)
    if kinds[0] != "clean":
        first_clean = kinds.index("clean")
        kinds[0], kinds[first_clean] = kinds[first_clean], kinds[0]
    return kinds


def _write_pretrain(spec: ShapesDataset, faults: list[str], folder: Path) -> tuple[list[dict], list[dict]]:
    """Write the images of noisy pairs, and return their rows and the truth about each."""
    rows, truth = [], []
    originals = []  # (scene caption, image bytes) of clean rows, for duplicates
    for index, fault in enumerate(faults):
        rng = make_row_rng(spec.seed, "pretrain", index)
        scene = draw_scene(rng)
        image, true_caption = draw_image(scene), describe_scene(scene)
        if fault == "duplicate":
            caption, data = rng.choice(originals)
            true_caption = caption
        else:
            data, caption = _damage(fault, scene, image, true_caption, rng)
        if fault == "clean":
            originals.append((caption, data))
        identifier = f"p{index:06d}"
        path = f"images/pretrain/{identifier}.png"
        (folder / path).write_bytes(data)
        rows.append({"id": identifier, "text": formats.build_dj_text(caption), "images": [path]})
        truth.append({"id": identifier, "fault": fault, "caption": true_caption})
    return rows, truth


def _damage(fault: str, scene: Scene, image, caption: str, rng: random.Random) -> tuple[bytes, str]:
    """Return the bytes of an image file and a caption, one of them damaged as `fault` says."""
    if fault == "mismatched":
        return encode_png(image), draw_mismatched_caption(scene, rng)
    if fault == "junk_text":
        return encode_png(image), draw_junk_caption(rng)
    if fault == "short_text":
        return encode_png(image), draw_short_caption(rng)
    if fault == "tiny_image":
        return encode_png(shrink_image(image, rng)), caption
    if fault == "extreme_aspect":
        return encode_png(draw_strip(image, rng)), caption
    if fault == "truncated_image":
        return truncate_bytes(encode_png(image)), caption
    if fault == "not_an_image":
        return build_error_page(rng), caption
    return encode_png(image), caption


def _write_finetune(spec: ShapesDataset, folder: Path) -> tuple[list[dict], list[dict]]:
    """Return instructions, QUESTIONS_PER_IMAGE for each image with rotating question types, and their true answers."""
    count = spec.finetune_instructions
    wrong = set(random.Random(f"{spec.seed}/wrong").sample(range(count), round(spec.wrong_instructions * count)))
    rows, truth = [], []
    for index in range(count):
        image_index, turn = divmod(index, QUESTIONS_PER_IMAGE)
        path = f"images/finetune/f{image_index:06d}.png"
        scene = draw_row_scene(spec.seed, "finetune", image_index)
        if turn == 0:
            (folder / path).write_bytes(encode_png(draw_image(scene)))
        kind = QUESTION_TYPES[index % len(QUESTION_TYPES)]
        rng = make_row_rng(spec.seed, "question", index)
        question, answer = draw_question(scene, kind, rng)
        row_answer = draw_wrong_answer(kind, answer, rng) if index in wrong else answer
        rows.append(formats.build_conversation(f"f{index:06d}", path, question, row_answer))
        truth.append({"id": f"f{index:06d}", "fault": "wrong" if index in wrong else "clean", "answer": answer})
    return rows, truth


def _write_evaluation(spec: ShapesDataset, folder: Path) -> Iterator[dict]:
    """Write the clean held-out images, and yield a row for each with caption, objects and a question of each type."""
    for index in range(spec.evaluation_images):
        scene = draw_row_scene(spec.seed, "evaluation", index)
        identifier = f"e{index:06d}"
        path = f"images/evaluation/{identifier}.png"
        (folder / path).write_bytes(encode_png(draw_image(scene)))
        rng = make_row_rng(spec.seed, "evaluation-question", index)
        triples = [(kind, *draw_question(scene, kind, rng)) for kind in QUESTION_TYPES]
        questions = [{"question": question, "answer": answer, "type": kind} for kind, question, answer in triples]
        yield {
            "id": identifier,
            "image": path,
            "captions": [describe_scene(scene)],
            "objects": [item.attributes for item in scene.objects],
            "questions": questions,
        }


def count_faults(faults: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(faults).items()))
