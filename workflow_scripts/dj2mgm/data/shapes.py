"""Embedded dataset of rendered scenes: one to three colored shapes, captions, questions, planted faults, and the truth.

A scene is a 2×2 board. Each object has its own quadrant, color and shape, so that every question has exactly one
correct answer.
"""

import io
import math
import random
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from dj2mgm.data import formats
from dj2mgm.errors import InputError
from dj2mgm.settings.dataset_files import ShapesDataset
from dj2mgm.storage.files import write_json_list, write_jsonl

IMAGE_SIZE = 128  # px; the CLIP tower sees 64 px, the high-resolution tower the full size
COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 200, 30),
    "purple": (140, 70, 190),
    "orange": (250, 130, 20),
    "pink": (240, 130, 190),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
POSITIONS = ("top left", "top right", "bottom left", "bottom right")
COUNT_WORDS = ("zero", "one", "two", "three")
COUNT_ODDS = (0.45, 0.4, 0.15)  # probabilities of one, two and three objects


@dataclass(frozen=True)
class SceneObject:
    """Colored shape at a position."""

    color: str
    shape: str
    position: str
    center: tuple[float, float]  # px, (x, y)
    radius: float  # px
    tilt: float  # radians

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def attributes(self) -> dict[str, str]:
        return {"color": self.color, "shape": self.shape, "position": self.position}


@dataclass(frozen=True)
class Scene:
    """Objects on a light background."""

    objects: tuple[SceneObject, ...]  # in reading order of their positions
    background: tuple[int, int, int]


def draw_scene(rng: random.Random) -> Scene:
    """Draw a random scene with distinct colors, shapes and quadrants, and random offset, size and tilt."""
    count = rng.choices((1, 2, 3), COUNT_ODDS)[0]
    colors, shapes = rng.sample(list(COLORS), count), rng.sample(SHAPES, count)
    quadrants = sorted(rng.sample(range(4), count))
    half = IMAGE_SIZE / 2
    objects = []
    for color, shape, quadrant in zip(colors, shapes, quadrants, strict=True):
        row, column = divmod(quadrant, 2)
        radius = rng.uniform(0.32, 0.44) * half
        slack = half / 2 - radius
        center = tuple((cell + 0.5) * half + rng.uniform(-slack, slack) for cell in (column, row))
        objects.append(SceneObject(color, shape, POSITIONS[quadrant], center, radius, rng.uniform(-0.2, 0.2)))
    shade = rng.randint(222, 250)
    return Scene(tuple(objects), (shade, shade, min(255, shade + rng.randint(0, 5))))


def draw_image(scene: Scene) -> Image.Image:
    """Render an RGB image of IMAGE_SIZE × IMAGE_SIZE pixels, antialiased by drawing at twice the size."""
    scale = 2
    image = Image.new("RGB", (IMAGE_SIZE * scale, IMAGE_SIZE * scale), scene.background)
    pen = ImageDraw.Draw(image)
    for item in scene.objects:
        x, y, r = item.center[0] * scale, item.center[1] * scale, item.radius * scale
        if item.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=COLORS[item.color])
        else:
            pen.polygon(_compute_outline(item.shape, x, y, r, item.tilt), fill=COLORS[item.color])
    return image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)


def _compute_outline(shape: str, x: float, y: float, r: float, tilt: float) -> list[tuple[float, float]]:
    """Return the corners of a polygon inside the circle of radius r around (x, y); angle 0 points up."""
    if shape == "cross":
        arm, width = 0.95, 0.32
        corners = [(width, arm), (width, width), (arm, width)]
        for _ in range(3):
            corners += [(b, -a) for a, b in corners[-3:]]
        cos, sin = math.cos(tilt), math.sin(tilt)
        return [(x + r * (a * cos - b * sin), y - r * (a * sin + b * cos)) for a, b in corners]
    radii = {"square": (1.0,) * 4, "triangle": (1.0,) * 3, "star": (1.0, 0.42) * 5}[shape]
    start = tilt + (math.pi / 4 if shape == "square" else 0.0)
    angles = [start + 2 * math.pi * k / len(radii) for k in range(len(radii))]
    return [(x + r * q * math.sin(a), y - r * q * math.cos(a)) for a, q in zip(angles, radii, strict=True)]


def describe_scene(scene: Scene) -> str:
    """Return the reference caption: every object with its position, in reading order.

    "a red circle at the top left, a blue square at the top right and a pink star at the bottom right"
    """
    parts = [f"a {item.name} at the {item.position}".replace("a orange", "an orange") for item in scene.objects]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def draw_question(scene: Scene, kind: str, rng: random.Random) -> tuple[str, str]:
    """Return a question of one of QUESTION_TYPES about the scene, and its only correct answer."""
    item = rng.choice(scene.objects)
    if kind == "color":
        return f"What color is the {item.shape}?", item.color
    if kind == "shape":
        return f"What shape is the {item.color} object?", item.shape
    if kind == "position":
        return f"Where is the {item.name}?", item.position
    if kind == "count":
        return "How many objects are there?", COUNT_WORDS[len(scene.objects)]
    if kind == "yes_no":
        return _ask_yes_no(scene, item, rng)
    raise ValueError(f"unknown question type {kind!r}; known types are {QUESTION_TYPES}")


QUESTION_TYPES = ("color", "shape", "count", "position", "yes_no")


def _ask_yes_no(scene: Scene, item: SceneObject, rng: random.Random) -> tuple[str, str]:
    """Return a yes/no question; with probability 0.5 it names a pair that is not in the scene."""
    if rng.random() < 0.5:
        return f"Is there a {item.name}?".replace("a orange", "an orange"), "yes"
    present = {(o.color, o.shape) for o in scene.objects}
    absent = [(c, s) for c in COLORS for s in SHAPES if (c, s) not in present]
    color, shape = rng.choice(absent)
    return f"Is there a {color} {shape}?".replace("a orange", "an orange"), "no"


ANSWERS = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "position": POSITIONS,
    "count": COUNT_WORDS[1:],
    "yes_no": ("yes", "no"),
}


def draw_wrong_answer(kind: str, answer: str, rng: random.Random) -> str:
    """Return another answer to a question of the same kind."""
    return rng.choice([other for other in ANSWERS[kind] if other != answer])


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
