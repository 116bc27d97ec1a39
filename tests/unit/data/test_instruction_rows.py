"""Conversion of instructions to rows of a recipe and back."""

from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.data.instruction_rows import convert_instructions, is_single_question
from dj2mgm.data.training_jsonl import convert_pairs


def test_a_question_survives_conversion_to_a_row_and_back():
    rows = [build_conversation(str(number), "a.png", f"Is it {number}?", f"no {number}") for number in range(3)]
    rows[1]["source"] = "mine"
    converted = list(convert_instructions(rows))
    assert converted[0] == {
        "id": "0",
        "text": build_dj_text("no 0"),
        "images": ["a.png"],
        "question": "Is it 0?",
    }
    assert list(convert_pairs(converted, "")) == rows


def test_only_single_questions_about_one_image_become_rows():
    row = build_conversation("1", "a.png", "What is it?", "a cat")
    turns = row["conversations"]
    image_last = row | {"conversations": [{"from": "human", "value": "What is it?\n<image>"}, turns[1]]}
    others = [
        {key: value for key, value in row.items() if key != "image"},
        row | {"image": ["a.png", "b.png"]},
        row | {"conversations": turns * 2},
        row | {"conversations": [{"from": "human", "value": "<image>"}, turns[1]]},
        row | {"conversations": [turns[0], {"from": "gpt", "value": " "}]},
        row | {"conversations": [{"from": "human", "value": "<image><image>\nWhat?"}, turns[1]]},
    ]
    assert not any(map(is_single_question, others))
    [first, last] = convert_instructions([*others, row, image_last])
    assert first["question"] == last["question"] == "What is it?"
