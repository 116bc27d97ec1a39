"""Text from which a language model learns to read a scene: a board of scene words, then a caption or an answer.

A language model that never met a scene in its context does not learn to look at one from a few thousand images; a
pretrained LLM has read descriptions of everything. The board has one word for each of the CLIP tower's patches, so
that in MGM the projected visual tokens take the place of these words.
"""

import random

from formats.llava import IMAGE_TOKEN
from formats.prompts import Segments, segments_of
from shapes.scenes import COLORS, IMAGE_SIZE, QUESTION_TYPES, SHAPES, Scene, SceneObject, ask, describe

EMPTY_WORD = "[empty]"
DESCRIBE = "Describe the image."


def scene_words() -> list[str]:
    return [EMPTY_WORD, *(scene_word(color, shape) for color in COLORS for shape in SHAPES)]


def board_of(scene: Scene, side: int, rng: random.Random, confusion: float = 0.15) -> list[str]:
    """side × side scene words in reading order, as an imperfect eye would report them.

    With probability `confusion` a patch of an object is reported as empty or as another colour or shape, so that the
    model learns to weigh its evidence as it must with projected visual tokens.
    """
    patch = IMAGE_SIZE / side
    board = []
    for row in range(side):
        for column in range(side):
            center = ((column + 0.5) * patch, (row + 0.5) * patch)
            seen = [item for item in scene.objects if _reaches(item, center, patch / 2)]
            board.append(_report(seen[0].color, seen[0].shape, rng, confusion) if seen else EMPTY_WORD)
    return board


def _reaches(item: SceneObject, center: tuple[float, float], half: float) -> bool:
    """Whether the object's circle, a little shrunk, reaches into the square patch around `center`."""
    gaps = (max(0.0, abs(a - b) - half) for a, b in zip(item.center, center, strict=True))
    return sum(gap**2 for gap in gaps) < (0.8 * item.radius) ** 2


def training_text(scene: Scene, side: int, eos: str, rng: random.Random) -> Segments:
    """One example as (text, is_answer) segments: a plain caption or a conversation, the board in the image's place."""
    if rng.random() < 0.35:
        turns, template = _turn(IMAGE_TOKEN, describe(scene)), "plain"
    else:
        template, turns = "gemma", []
        for kind in rng.sample(QUESTION_TYPES, 3):
            turns += _turn(*ask(scene, kind, rng))
        description = _turn(DESCRIBE, describe(scene))
        turns = description + turns if rng.random() < 0.5 else turns + description
        turns[0]["value"] = f"{IMAGE_TOKEN}\n{turns[0]['value']}"
    board = "".join(board_of(scene, side, rng))
    return [(text.replace(IMAGE_TOKEN, board), is_answer) for text, is_answer in segments_of(template, turns, eos)]


def _turn(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def scene_word(color: str, shape: str) -> str:
    return f"[{color} {shape}]"


def _report(color: str, shape: str, rng: random.Random, confusion: float) -> str:
    if rng.random() >= confusion:
        return scene_word(color, shape)
    mistake = rng.randrange(3)
    if mistake == 0:
        return EMPTY_WORD
    if mistake == 1:
        return scene_word(rng.choice(list(COLORS)), shape)
    return scene_word(color, rng.choice(SHAPES))
