"""Scenes of one to three colored shapes: objects, drawing, captions and questions.

A scene is a 2×2 board. Each object has its own quadrant, color and shape, so that every question has exactly one
correct answer.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

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
