"""Likelihoods of reference answers and captions."""

from math import exp, log

import pytest

import evaluate_vqa
from dj2mgm.evaluation.groups import is_share
from dj2mgm.evaluation.run_scores import aggregate, read_run_scores
from dj2mgm.evaluation.vqa import (
    ANSWER,
    CAPTION,
    build_likelihood_row,
    measure_log_likelihoods,
    read_likelihoods,
)
from dj2mgm.storage.files import write_jsonl
from run_main import run_main


def row(image: str, kind: str, reference: str, values: list[float], images: str = "own") -> dict:
    keys = {"id": image, "image_id": image, "model": "finetune", "images": images}
    return keys | build_likelihood_row(kind, "What color?", reference, values)


def pair(*rows: dict, gain: float = 1.0) -> list[dict]:
    """Return rows for own images, and for shuffled images with a lower log-likelihood."""
    changes = ({"images": "shuffled", "log_likelihood": own["log_likelihood"] - gain} for own in rows)
    return [*rows, *(own | change for own, change in zip(rows, changes, strict=True))]


@pytest.fixture
def metrics(tmp_path):
    """Return a function that measures the rows of a file, written in reverse order."""

    def measure(rows: list[dict]) -> dict:
        write_jsonl(tmp_path / "likelihoods.jsonl", rows[::-1])
        return measure_log_likelihoods(read_likelihoods(tmp_path / "likelihoods.jsonl"))

    return measure


def test_probability_covers_all_tokens_of_an_answer(metrics):
    rows = pair(row("a", ANSWER, "dark red", [log(0.5), log(0.5)]), row("b", ANSWER, "red", [log(0.1)]))
    own_metrics = metrics(rows)["finetune/own"]
    assert own_metrics["answer_probability"].values.tolist() == pytest.approx([0.25, 0.1], rel=1e-5)
    assert own_metrics["answer_log_likelihood"].values.tolist() == pytest.approx([log(0.25), log(0.1)], rel=1e-5)
    assert is_share("answer_probability") and not is_share("answer_log_likelihood")


def test_the_most_likely_caption_per_token_counts(metrics):
    rows = pair(row("a", CAPTION, "a cat", [-1.0, -2.0]), row("a", CAPTION, "one cat there", [-1.0, -1.0, -1.0, -1.4]))
    own_metrics = metrics(rows)["finetune/own"]
    assert own_metrics.keys() == {"caption_log_likelihood"}
    assert own_metrics["caption_log_likelihood"].values.tolist() == [-1.1]


def test_the_gain_over_shuffled_images_is_a_group(tmp_path, capsys):
    rows = pair(*(row(name, ANSWER, "red", [-1.0]) for name in "ab"), gain=1.5)
    write_jsonl(tmp_path / "likelihoods.jsonl", rows)
    write_jsonl(tmp_path / "answers.jsonl", [])
    files = [f"--{name}={tmp_path}/{name}.jsonl" for name in ("answers", "likelihoods")]
    assert run_main(evaluate_vqa, *files, f"--output-dir={tmp_path}", capture=capsys).status == 0
    groups = aggregate([read_run_scores("baseline", 0, tmp_path / "scores.jsonl")])
    assert groups["finetune/difference"]["answer_log_likelihood"].mean == pytest.approx(1.5)
    assert groups["finetune/difference"]["answer_probability"].mean == pytest.approx(exp(-1) - exp(-2.5), rel=1e-5)
