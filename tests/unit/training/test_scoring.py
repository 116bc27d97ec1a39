"""Scores of a model in training equal those of its answers and do not change the training."""

from pathlib import Path

import pytest

from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.models.generators import load_generator
from dj2mgm.settings.models import read_chat_template
from dj2mgm.settings.training_stages import read_deepspeed
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_yaml
from tiny_models import save_image
from trained_stages import KILLED_AT, SAVED_AT, STEPS, TUNINGS, assert_equal_outcomes, build_flags, make_inputs, shared

WORDS = "red circle at the top left two".split()
ALWAYS = 100.0  # share that suffices for all questions
SCORES = {"questions": 10, "share": ALWAYS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write training data, seven held-out images with two questions each, and the settings for scoring."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    rows = []
    for number, word in enumerate(WORDS):
        save_image(folder / f"held_out/{number}.png", (30 * number, 200 - 20 * number, 90), (20, 16))
        questions = [
            {"type": "word", "question": "What color is the circle?", "answer": word},
            {"type": "words", "question": "How many objects are there?", "answer": f"{word} {WORDS[0]}"},
        ]
        row = {"id": f"e{number}", "image": f"{number}.png", "captions": [f"a {word} circle"], "questions": questions}
        rows.append(row)
    write_jsonl(folder / "evaluation.jsonl", rows)
    captions = {stage: {"template": read_chat_template("plain"), "question": ""} for stage in ("pretrain", "finetune")}
    asking = {"image_root": str(folder / "held_out"), "question_prompt": "{question}", "captions": captions}
    write_yaml(folder / "asking.yaml", asking)
    return folder


def add_questions(folder: Path, arguments: dict) -> dict:
    return arguments | {"--evaluation": folder / "evaluation.jsonl", "--generate-config": folder / "asking.yaml"}


def scores(output: Path) -> list[dict]:
    return list(read_jsonl(output / "scores.jsonl"))


@pytest.mark.parametrize(
    ("tuning", "configuration"),
    [pytest.param("stage 1", "zero2", marks=pytest.mark.slow), ("LoRA", "zero3_offload")],
)
def test_scores_do_not_change_training_or_repeat_after_a_kill(folder, forks, tmp_path, tuning, configuration):
    """Weights, losses and rates are equal bit for bit, dropout included."""
    script = f"{TUNINGS[tuning]}.py"
    changed = {"deepspeed": read_deepspeed(configuration, TUNINGS[tuning]), "precision": "bf16"}
    plain = build_flags(folder, tmp_path / "plain", tuning, **changed)
    assert forks.run(script, plain).ok
    assert scores(tmp_path / "plain") == []
    scored, killed = (
        add_questions(folder, build_flags(folder, tmp_path / name, tuning, **changed, score_while_training=SCORES))
        for name in ("scored", "killed")
    )
    ended = forks.run(script, scored)
    assert ended.ok, ended.printed[-3000:]
    assert not forks.run(script, killed, kill_at=KILLED_AT).ok
    ended = forks.run(script, killed)
    assert ended.ok and "resuming" in ended.printed, ended.printed[-3000:]
    for name in ("scored", "killed"):
        assert_equal_outcomes(tmp_path / name, tmp_path / "plain")
        assert [row["step"] for row in scores(tmp_path / name)] == [SAVED_AT, STEPS]
    for expected, repeated in zip(*(scores(tmp_path / name) for name in ("scored", "killed")), strict=True):
        assert {**expected, "seconds": 0} == {**repeated, "seconds": 0}
    record = read_json(tmp_path / "scored/metrics.json")["scores"]
    assert record["asked"] == ("captions" if tuning == "stage 1" else "questions")
    assert record["questions"] == (7 if tuning == "stage 1" else 10)
    assert ("accuracy" in scores(tmp_path / "scored")[0]) == (tuning != "stage 1")


def test_two_processes_score_the_questions_of_one(folder, forks, tmp_path):
    """Processes gather ZeRO-3's layers together, and the second one has one micro batch less."""
    changed = {"deepspeed": read_deepspeed("zero3", "pretrain"), "score_while_training": SCORES, "save_steps": 3}
    for processes in (1, 2):
        arguments = add_questions(folder, shared(folder, tmp_path / str(processes), processes, 3, 24, **changed))
        ended = forks.run("pretrain.py", arguments, processes)
        assert ended.ok, ended.printed[-3000:]
    rows, rows_of_two = (scores(tmp_path / str(processes)) for processes in (1, 2))
    assert [row["step"] for row in rows] == [3, 6, 8] and [row["questions"] for row in rows_of_two] == [7, 7, 7]
    assert [row["loss"] for row in rows_of_two] == pytest.approx([row["loss"] for row in rows], rel=1e-4)


def test_the_last_scores_equal_those_of_generated_answers(folder, forks, tmp_path):
    changed = {"score_while_training": {"questions": 14, "share": ALWAYS}, "template": "gemma", "save_steps": 20}
    arguments = shared(folder, tmp_path / "1", 1, 4, 4, "full", **changed, epochs=12, learning_rate=4e-3)
    ended = forks.run("finetune.py", add_questions(folder, arguments) | {"--data": learned(folder, tmp_path)})
    assert ended.ok, ended.printed[-3000:]
    [*_, last] = scores(tmp_path / "1")
    asked_last = list(read_jsonl(tmp_path / "1/scored.jsonl"))
    answered = load_generator(folder / "mgm", tmp_path / "1", "cpu").answer(
        [str(folder / f"held_out/{row['id'][1:]}.png") for row in asked_last],
        [row["question"] for row in asked_last],
        read_chat_template("gemma"),
        max_new_tokens=12,
        batch_size=4,  # another batch size than in scoring
    )
    generated = [is_correct(row | {"prediction": text}) for row, text in zip(asked_last, answered, strict=True)]
    assert [row["correct"] for row in asked_last] == generated
    assert last["accuracy"] == pytest.approx(sum(generated) / 14) and 0 < sum(generated) < 14


def learned(folder: Path, tmp_path: Path) -> Path:
    """Return the held-out questions, all with the same answer."""
    rows = [
        {
            "id": f"{row['id']}/{number}",
            "image": str(folder / "held_out" / row["image"]),
            "conversations": [
                {"from": "human", "value": f"<image>\n{item['question']}"},
                {"from": "gpt", "value": ("circle", "red red")[number]},
            ],
        }
        for row in read_jsonl(folder / "evaluation.jsonl")
        for number, item in enumerate(row["questions"])
    ]
    write_jsonl(tmp_path / "learned.jsonl", rows)
    return tmp_path / "learned.jsonl"


def test_other_questions_score_the_last_weights_without_training(folder, forks, tmp_path):
    output = tmp_path / "stage"
    arguments = add_questions(folder, build_flags(folder, output, "LoRA", score_while_training=SCORES))
    assert forks.run("finetune.py", arguments).ok
    rows = list(read_jsonl(folder / "evaluation.jsonl"))[:4]
    write_jsonl(tmp_path / "fewer.jsonl", rows)
    ended = forks.run("finetune.py", arguments | {"--evaluation": tmp_path / "fewer.jsonl"})
    assert ended.ok and f"resuming from step {STEPS}" in ended.printed, ended.printed[-3000:]
    assert [(row["step"], row["questions"]) for row in scores(output)] == [(STEPS, 8)]


def test_few_samples_between_checkpoints_allow_few_questions(folder, forks, tmp_path):
    """Checkpoints at steps 2 and 4 of 4 samples each allow 3 * 0.25 * 2 * 4 of the 14 questions."""
    changed = {"save_steps": 2, "max_steps": 4, "score_while_training": {"questions": 14, "share": 0.25}}
    arguments = add_questions(folder, shared(folder, tmp_path, 1, 4, 4, "LoRA", **changed))
    ended = forks.run("finetune.py", arguments)
    assert ended.ok, ended.printed[-3000:]
    assert [row["questions"] for row in scores(tmp_path)] == [6, 6]
