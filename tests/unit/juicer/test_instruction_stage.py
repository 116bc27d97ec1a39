"""The synthesize stage with a recipe for instructions: rows and statistics."""

import pytest

from dj2mgm.data.formats import extract_caption
from dj2mgm.juicer.operators.likelihood_gain_filter import compute_likelihood_gain
from dj2mgm.juicer.run_recipe import SYNTHESIZED
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.models.questions import GivenAnswer
from dj2mgm.storage.files import read_jsonl
from instructions import ANSWERS, COUNT, QUESTIONS, select


def test_gains_are_computed_for_answers_given_questions(project, tmp_path):
    process = [{"likelihood_gain_filter": {"keep_fraction": 0.5, "other_images": 2}}]
    summary = select(project, tmp_path, process)
    assert (summary["rows_in"], summary["rows_kept"], summary["rows"]) == (COUNT, 3, "instructions")
    stats = {row["id"]: row for row in read_jsonl(tmp_path / "out/stats.jsonl")}
    stats |= {row["id"]: row["stats"] for row in read_jsonl(tmp_path / "out/dropped.jsonl")}
    generator = MGMGenerator(project / "base", project / "pretrain", "cpu")
    images = [str(project / "data/images" / f"{number}.png") for number in range(3)]
    gains = []
    for number, answer in enumerate(ANSWERS):
        own = number // 2
        answers = [GivenAnswer((own + step) % 3, QUESTIONS[number % 2], answer) for step in range(3)]
        gains.append(compute_likelihood_gain(generator.compute_answer_log_likelihoods(images, answers, "gemma"), 1.0))
        assert stats[f"i{number}"]["likelihood_gain"] == pytest.approx([gains[-1]], abs=1e-5)
    kept_rows = list(read_jsonl(tmp_path / "out" / SYNTHESIZED))
    best = sorted(sorted(range(COUNT), key=lambda number: -gains[number])[:3])
    assert [row["id"] for row in kept_rows] == [f"i{number}" for number in best]
    for row, number in zip(kept_rows, best, strict=True):
        assert (row["question"], extract_caption(row["text"])) == (QUESTIONS[number % 2], ANSWERS[number])
        assert row["images"] == [f"images/{number // 2}.png"]
