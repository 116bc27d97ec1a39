"""VQA accuracy: normalization, groups, paired differences, and messages about missing files."""

import json
import sys

import pytest

import evaluate_vqa
from dj2mgm.evaluation.groups import read_paired_rows
from dj2mgm.evaluation.vqa import evaluate_answers, normalize_answer
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl


def answer(identifier, kind, prediction, truth="red", model="finetune", images="own") -> dict:
    row = {"id": identifier, "image_id": identifier, "model": model, "images": images}
    row |= {"type": kind, "question": f"{kind}?"}
    return row | {"answer": truth, "prediction": prediction}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("Red", "red"),
        ("  top   left.\n", "top left"),
        ("The top left", "top left"),
        ("on the table", "on table"),
        ("A.", "a"),
        ("an orange circle", "orange circle"),
        ("3.5", "3.5"),
        ("", ""),
    ],
)
def test_normalization(raw, expected):
    assert normalize_answer(raw) == expected
    assert normalize_answer(normalize_answer(raw)) == expected


def run(tmp_path, monkeypatch, rows, *flags) -> dict:
    write_jsonl(tmp_path / "answers.jsonl", rows)
    arguments = ["--answers", tmp_path / "answers.jsonl", "--output-dir", tmp_path, *flags]
    monkeypatch.setattr(sys, "argv", ["evaluate_vqa.py", *map(str, arguments)])
    evaluate_vqa.main()
    return read_json(tmp_path / "metrics.json")


def test_overall_accuracy_is_a_micro_average(tmp_path, monkeypatch):
    own = [answer("1", "color", "Red."), answer("2", "color", "blue"), answer("3", "color", "red")]
    own += [answer("1", "count", "two", truth="two")]
    shuffled = [row | {"images": "shuffled", "prediction": "blue"} for row in own]
    metrics = run(tmp_path, monkeypatch, own + shuffled)
    means = {name: estimate["mean"] for name, estimate in metrics["groups"]["finetune/own"].items()}
    assert means == {"vqa_accuracy": 0.75, "vqa_accuracy_color": pytest.approx(2 / 3), "vqa_accuracy_count": 1.0}
    assert metrics["groups"]["finetune/shuffled"]["vqa_accuracy"]["mean"] == 0
    assert metrics["groups"]["finetune/difference"]["vqa_accuracy"]["mean"] == 0.75
    assert metrics["questions"] == 4


def test_separate_metrics_leave_out_leaked_questions(tmp_path, monkeypatch):
    own = [answer("1", "color", "red"), answer("2", "color", "blue"), answer("2", "count", "two", truth="three")]
    rows = own + [row | {"images": "shuffled"} for row in own]
    leaks = tmp_path / "leaks.jsonl"
    write_jsonl(leaks, [{"image": "a.png", "of": "held_out", "ids": ["2"], "bits": 3}])
    metrics, plain = run(tmp_path, monkeypatch, rows, "--leaks", leaks), run(tmp_path, monkeypatch, rows)
    assert {key: value for key, value in metrics.items() if key != "without_leaked"} == plain
    assert metrics["without_leaked"]["questions"] == 1
    assert metrics["without_leaked"]["groups"]["finetune/own"]["vqa_accuracy"]["mean"] == 1.0
    write_jsonl(leaks, [{"image": "a.png", "of": "textvqa", "ids": ["2"], "bits": 3}])
    assert run(tmp_path, monkeypatch, rows, "--leaks", leaks) == plain


def test_scores_have_sum_and_count_of_each_image(tmp_path, monkeypatch):
    own = [answer("2", "color", "red"), answer("1", "color", "red"), answer("1", "count", "two", truth="three")]
    shuffled = [row | {"images": "shuffled", "prediction": "blue"} for row in own]
    metrics = run(tmp_path, monkeypatch, shuffled + own)
    rows = list(read_jsonl(tmp_path / "scores.jsonl"))
    keys = [(row["model"], row["images"], row["id"]) for row in rows]
    assert keys == [("finetune", images, identifier) for images in ("own", "shuffled") for identifier in ("1", "2")]
    assert rows[0]["values"] == {"vqa_accuracy": [1, 2], "vqa_accuracy_color": [1, 1], "vqa_accuracy_count": [0, 1]}
    assert rows[1]["values"] == {"vqa_accuracy": [1, 1], "vqa_accuracy_color": [1, 1]}
    for images in ("own", "shuffled"):
        for metric, estimate in metrics["groups"][f"finetune/{images}"].items():
            values = [row["values"][metric] for row in rows if row["images"] == images and metric in row["values"]]
            total, count = map(sum, zip(*values, strict=True))
            assert estimate["mean"] == pytest.approx(total / count) and estimate["n"] == count


def test_difference_is_paired_in_any_order_of_rows(tmp_path):
    """Own and shuffled answers are right for the same questions, so the difference is 0."""
    own = [answer(str(i), "color", "red" if i % 3 else "blue") for i in range(30)]
    shuffled = [row | {"images": "shuffled"} for row in reversed(own)]
    write_jsonl(tmp_path / "answers.jsonl", shuffled + own)
    models = read_paired_rows(tmp_path / "answers.jsonl", ("id", "type", "question"))
    difference = evaluate_answers(models, {})["groups"]["finetune/difference"]["vqa_accuracy"]
    assert (difference.mean, difference.low, difference.high) == (0, 0, 0)


def test_each_model_has_its_groups_and_empty_answers_are_counted(tmp_path, monkeypatch):
    rows = [
        answer("1", "color", prediction, model=model, images=images)
        for model, prediction in (("pretrain", " "), ("finetune", "red"))
        for images in ("own", "shuffled")
    ]
    metrics = run(tmp_path, monkeypatch, rows)
    assert len(metrics["groups"]) == 6
    assert metrics["counts"]["pretrain/own"] == {"answers": 1, "empty": 1}
    assert metrics["counts"]["finetune/own"] == {"answers": 1, "empty": 0}


def test_a_dataset_without_questions_is_accepted(tmp_path, monkeypatch):
    metrics = run(tmp_path, monkeypatch, [])
    assert metrics["questions"] == 0 and metrics["groups"] == {}
    assert (tmp_path / "scores.jsonl").read_bytes() == b""


def test_output_is_deterministic(tmp_path, monkeypatch):
    rows = [
        answer(str(i), "color", "red" if i % 2 else "blue", images=s) for s in ("own", "shuffled") for i in range(9)
    ]
    assert json.dumps(run(tmp_path, monkeypatch, rows)) == json.dumps(run(tmp_path, monkeypatch, rows))
