"""Attributes of captions: parsing, comparison with a scene, and metrics."""

import numpy as np
import pytest

from dj2mgm.data.shapes import describe_scene, draw_row_scene
from dj2mgm.evaluation.caption_attributes import count_extra, is_true, judge_caption, measure_attributes, parse_caption

SCENES = [draw_row_scene(seed=1, split="evaluation", index=index) for index in range(300)]
RED_AND_BLUE = [
    {"color": "red", "shape": "circle", "position": "top left"},
    {"color": "blue", "shape": "star", "position": "bottom right"},
]


def attributes(scene) -> list[dict]:
    return [item.attributes for item in scene.objects]


@pytest.mark.parametrize("scene", SCENES[:60])
def test_parsing_undoes_describing(scene):
    assert parse_caption(describe_scene(scene)) == attributes(scene)


def test_a_scenes_own_description_is_entirely_right():
    for scene in SCENES:
        assert judge_caption(describe_scene(scene), attributes(scene)).all()
        assert count_extra(describe_scene(scene), attributes(scene)) == 0


def test_a_changed_word_makes_exactly_one_attribute_wrong():
    caption = "a red circle at the top left and a blue star at the bottom right"
    assert judge_caption(caption.replace("red", "green"), RED_AND_BLUE).tolist() == [[0, 1, 1], [1, 1, 1]]
    assert judge_caption(caption.replace("star", "cross"), RED_AND_BLUE).tolist() == [[1, 1, 1], [1, 0, 1]]


def test_misplaced_object_is_wrong_and_counts_as_extra():
    caption = "a red circle at the top left and a blue star at the bottom left"
    assert judge_caption(caption, RED_AND_BLUE).tolist() == [[1, 1, 1], [0, 0, 0]]
    assert count_extra(caption, RED_AND_BLUE) == 1


@pytest.mark.parametrize("caption", ["", "   ", "red circle", "a picture of something", "at the top left"])
def test_captions_outside_the_grammar_have_no_right_attribute(caption):
    assert not judge_caption(caption, RED_AND_BLUE).any()
    assert count_extra(caption, RED_AND_BLUE) == 0


def test_the_first_object_at_a_position_counts():
    caption = "a green circle at the top left and a red circle at the top left"
    assert judge_caption(caption, RED_AND_BLUE).tolist() == [[0, 1, 1], [0, 0, 0]]
    assert count_extra(caption, RED_AND_BLUE) == 1


def test_capitals_and_final_stop_do_not_matter():
    caption = "A red circle at the top left, and a blue star at the bottom right."
    assert judge_caption(caption, RED_AND_BLUE).all()


def test_metrics_weigh_attributes_equally_and_skip_empty_rows():
    rows = [
        {"image_id": "1", "objects": RED_AND_BLUE, "captions": ["a red circle at the top left"]},
        {"image_id": "2", "objects": RED_AND_BLUE[:1], "captions": ["other", "a red circle at the top left"]},
        {"image_id": "3", "objects": [], "captions": ["a cat"]},
    ]
    metrics = measure_attributes(["a red circle at the top left", "a red square at the top left", "a cat"], rows)
    means = {name: measured.values.mean() for name, measured in metrics.items()}
    # 3 of 6 attributes of the first row, 2 of 3 of the second
    assert means == pytest.approx(
        {
            "attribute_accuracy": 5 / 9,
            "color_accuracy": 2 / 3,
            "shape_accuracy": 1 / 3,
            "position_accuracy": 2 / 3,
            "exact_match": 1 / 2,
            "extra_objects": 0,
        }
    )
    assert set(metrics["attribute_accuracy"].units) == {"1", "2"}


def test_accuracy_is_the_mean_of_its_three_kinds():
    rows = [{"image_id": str(i), "objects": attributes(scene), "captions": ["-"]} for i, scene in enumerate(SCENES)]
    captions = [describe_scene(scene) for scene in SCENES[1:] + SCENES[:1]]  # each describes the next scene
    means = {name: measured.values.mean() for name, measured in measure_attributes(captions, rows).items()}
    kinds = [means[f"{kind}_accuracy"] for kind in ("color", "shape", "position")]
    assert means["attribute_accuracy"] == pytest.approx(np.mean(kinds))
    assert means["attribute_accuracy"] < 0.5


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a red circle at the top left and a blue star at the bottom right", True),
        ("a blue star at the bottom right", True),  # an incomplete caption can be true
        ("a red circle at the top right", False),
        ("a red circle at the top left and a green star at the bottom right", False),
        ("a picture", False),
        ("", False),
    ],
)
def test_true_caption_states_only_objects_of_the_image(caption, expected):
    assert is_true(caption, "a red circle at the top left and a blue star at the bottom right") is expected


def test_there_are_no_metrics_without_objects():
    assert measure_attributes(["a cat"], [{"image_id": "1", "objects": [], "captions": ["a cat"]}]) == {}
