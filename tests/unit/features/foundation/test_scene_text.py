"""Training texts of the language model: the board in every example, and loss only on answers."""

import random

from dj2mgm.data.shapes import draw_row_scene
from dj2mgm.features.foundation.tiny_parts import (
    EMPTY_WORD,
    draw_board,
    draw_training_example,
    list_scene_words,
    load_chat_templates,
)
from dj2mgm.settings.string_formats import CONTROL_TOKEN_PATTERN
from tiny_models import tiny_tokenizer


def examples(count=60):
    templates = load_chat_templates(tiny_tokenizer())
    for index in range(count):
        yield (
            draw_row_scene(0, "test", index),
            draw_training_example(draw_row_scene(0, "test", index), 4, templates, random.Random(index)),
        )


def test_every_example_shows_the_board_once_before_answers():
    words = list_scene_words()
    for _, segments in examples():
        first, *rest = segments
        assert sum(first[0].count(word) for word in words) == 16 and not first[1]
        assert not any(word in text for text, _ in rest for word in words)


def test_answers_describe_the_scene_without_the_board():
    for scene, segments in examples():
        answers = " ".join(text for text, is_answer in segments if is_answer)
        assert all(item.color in answers for item in scene.objects) or "at the" not in answers
        assert not any(CONTROL_TOKEN_PATTERN.sub("", text).count("[") for text, is_answer in segments if is_answer)


def test_board_without_confusion_names_the_scenes_objects():
    for index in range(50):
        scene = draw_row_scene(0, "test", index)
        board = draw_board(scene, 4, random.Random(0), confusion=0.0)
        assert {word for word in board if word != EMPTY_WORD} == {f"[{o.color} {o.shape}]" for o in scene.objects}
        for item in scene.objects:
            row, column = 2 * ("bottom" in item.position), 2 * ("right" in item.position)
            quadrant = {board[4 * r + c] for r in (row, row + 1) for c in (column, column + 1)}
            assert f"[{item.color} {item.shape}]" in quadrant
