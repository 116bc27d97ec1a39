"""Evaluation rows with one image under several names, which intervals count as one image."""

import shutil
from contextlib import contextmanager
from dataclasses import asdict

import pytest

import evaluate_vqa
import generate_answers
from dj2mgm.evaluation.run_scores import aggregate, drop_images, read_run_scores
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_yaml
from run_main import Outcome, run_main
from tiny_models import save_image

IMAGES, QUESTIONS = 4, 3
DECODING = {"batch_size": 1, "max_new_tokens": 5}


class Fake:
    """Fake generator with answers that depend on the numbers of image and question."""

    def answer(self, images, questions, template, **decoding):
        pairs = zip(images, questions, strict=True)
        return ["yes" if (int(image.stem[0]) + len(question)) % 3 else "no" for image, question in pairs]

    def compute_log_likelihoods(self, images, questions, answers, template):
        return [[-int(image.stem[0]) if image else -9, -0.5] for image in images]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Save images with a copy of each under another name."""

    @contextmanager
    def fake(*_):
        yield lambda stage: Fake()

    monkeypatch.setattr(generate_answers, "open_generators", fake)
    for number in range(IMAGES):
        save_image(tmp_path / f"{number}.png", (60 * number, 0, 0))
        shutil.copy(tmp_path / f"{number}.png", tmp_path / f"{number}copy.png")
    captions = {"finetune": {"question": "", "template": "t"}}
    settings = {"cpu_threads": 1, "gpus": 1, "seed": 0, "image_root": str(tmp_path), "question_prompt": "{question}"}
    settings |= {"decoding": DECODING, "template": "t", "captions": captions | {"base": captions["finetune"]}}
    write_yaml(tmp_path / "config.yaml", settings)
    return tmp_path


def question(number: int) -> dict:
    return {"type": "what", "question": "?" * (1 + number), "answer": "yes"}


def generated(folder, rows: list[dict], capsys) -> Outcome:
    write_jsonl(folder / "evaluation.jsonl", rows)
    arguments = [
        "--config",
        "config.yaml",
        "--model",
        "m",
        "--evaluation",
        "evaluation.jsonl",
        "--finetuned",
        "finetune",
    ]
    arguments = [flag if flag.startswith("--") else str(folder / flag) for flag in arguments]
    return run_main(generate_answers, *arguments, "--output-dir", str(folder), capture=capsys)


def evaluated(folder, rows: list[dict], capsys, *flags: str) -> dict:
    """Return the outputs of the two scripts for an evaluation file."""
    done = generated(folder, rows, capsys)
    assert done.status == 0, done.stderr
    files = [f"--{name}={folder}/{name}.jsonl" for name in ("answers", "likelihoods")]
    done = run_main(evaluate_vqa, *files, f"--output-dir={folder}", *flags, capture=capsys)
    assert done.status == 0, done.stderr
    return read_json(folder / "metrics.json")


def by_image() -> list[dict]:
    questions = [question(number) for number in range(QUESTIONS)]
    return [{"id": f"e{n}-0", "image": f"{n}.png", "captions": ["a"], "questions": questions} for n in range(IMAGES)]


def by_question() -> list[dict]:
    return [
        {
            "id": f"e{n}-{number}",
            "image": f"{n}copy.png" if number == 1 else f"./{n}.png",
            "captions": ["a"],
            "questions": [question(number)],
        }
        for n in range(IMAGES)
        for number in range(QUESTIONS)
    ]


def test_rows_by_question_and_by_image_give_equal_results(folder, capsys):
    expected = evaluated(folder, by_image(), capsys)
    scores = list(read_jsonl(folder / "scores.jsonl"))
    result = evaluated(folder, by_question(), capsys)
    assert result["groups"] == expected["groups"] and result["counts"] == expected["counts"]
    assert result["groups"]["finetune/own"]["vqa_accuracy"]["images"] == IMAGES
    assert list(read_jsonl(folder / "scores.jsonl")) == scores
    blind = [result["groups"][f"{model}/none"]["answer_log_likelihood"] for model in ("base", "finetune")]
    assert all(group["mean"] == -9.5 and group["images"] == IMAGES for group in blind)
    for file in ("captions.jsonl", "answers.jsonl", "likelihoods.jsonl"):
        rows = list(read_jsonl(folder / file))
        assert {row["id"] for row in rows} == {row["id"] for row in by_question()}
        assert all(row["image_id"] == f"{row['id'][:2]}-0" for row in rows)


def test_a_row_for_each_image_is_an_image_of_its_id(folder, capsys):
    evaluated(folder, by_image(), capsys)
    for file in ("captions.jsonl", "answers.jsonl", "likelihoods.jsonl", "scores.jsonl"):
        assert all(row["id"] == row.get("image_id", row["id"]) for row in read_jsonl(folder / file))
    assert {row["id"] for row in read_jsonl(folder / "scores.jsonl")} == {row["id"] for row in by_image()}


def test_report_and_metrics_leave_out_leaked_images(folder, capsys):
    leaked = {row["id"] for row in by_question() if row["id"].startswith("e2")}  # all rows of an image
    write_jsonl(folder / "leaks.jsonl", [{"of": "held_out", "ids": sorted(leaked)}])
    metrics = evaluated(folder, by_question(), capsys, "--leaks", str(folder / "leaks.jsonl"))
    rest = metrics["without_leaked"]
    assert rest["questions"] == (IMAGES - 1) * QUESTIONS
    assert rest["groups"]["finetune/own"]["vqa_accuracy"]["images"] == IMAGES - 1
    left = drop_images(read_run_scores("a", 0, folder / "scores.jsonl"), leaked)
    own = {metric: asdict(estimate) for metric, estimate in aggregate([left])["finetune/own"].items()}
    assert own == rest["groups"]["finetune/own"]


def test_a_control_needs_more_than_one_distinct_image(folder, capsys):
    done = generated(folder, by_question()[:QUESTIONS], capsys)
    assert done.status == 2 and "has 1 different images; at least 2 are needed for the shuffled control" in done.stderr
