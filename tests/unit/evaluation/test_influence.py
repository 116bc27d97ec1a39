"""Influence of training rows compared with autograd's gradients, the kept rows, and the page."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from dj2mgm.evaluation.influence import ExtremeRows, LabelledTokens, measure_influence, read_labelled_tokens
from dj2mgm.evaluation.rank_correlation import correlate_ranks
from dj2mgm.evaluation.served_answers import AskedQuestion
from dj2mgm.models.families import load_family
from dj2mgm.reporting.influence_page import TracedAnswer, TracedRow, rate_statistics, write_influence_page
from dj2mgm.storage.files import read_jsonl, write_jsonl
from tiny_families import save_tiny_family
from tiny_models import save_image
from trained_stages import make_inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["mgm", "smolvlm"])
def test_influence_is_the_product_of_both_gradients(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.evaluation.influence.ROWS_AT_ONCE", 2)
    monkeypatch.setattr("dj2mgm.evaluation.influence.TOKENS_AT_ONCE", 3)
    make_inputs(tmp_path)
    if kind != "mgm":
        save_tiny_family(kind, tmp_path / kind)
    family = load_family(tmp_path / kind)
    model = family.load(torch.float32, "sdpa").eval()
    encoder, head = family.make_encoder("plain", 512), family.find_parts(model).head
    head.weight = nn.Parameter(head.weight.detach().clone())  # without the embedding
    rows = list(read_jsonl(tmp_path / "conversations.jsonl"))

    def gradient(row: dict) -> torch.Tensor:
        item = encoder.encode_row(row)
        batch = encoder.batch([item], len(item["input_ids"]))
        loss = model(**family.prepare_inputs(batch, CPU)).loss * len(batch["answer_positions"])
        return torch.autograd.grad(loss, head.weight)[0].flatten()

    gradients = torch.stack([gradient(row) for row in rows])
    parts = list(read_labelled_tokens(model, family, encoder, rows, CPU))
    answers = LabelledTokens.concatenate(parts[1:])
    assert [part.count for part in parts] == [2, 2, 1] and answers.count == 3
    influence = torch.cat([measure_influence(part, answers, head) for part in parts])
    torch.testing.assert_close(influence, gradients @ gradients[2:].T, rtol=1e-4, atol=1e-6)


def test_the_lowest_and_highest_rows_of_all_parts_are_kept():
    torch.manual_seed(0)
    influence = torch.randn(50, 4)
    extremes = ExtremeRows(6)
    for part in influence.split(3):
        extremes.add(part)
    order = influence.argsort(dim=0)
    for answer in range(4):
        assert [row for _, row in extremes.find_lowest(answer)] == order[:6, answer].tolist()
        assert [row for _, row in extremes.find_highest(answer)] == order[-6:, answer].flip(0).tolist()
        assert [value for value, _ in extremes.find_lowest(answer)] == influence[order[:6, answer], answer].tolist()


def test_the_page_escapes_the_markup_of_rows(tmp_path):
    image = save_image(tmp_path / "0.png", (200, 0, 0))
    turns = [{"from": "human", "value": "<image>\nWhat <b>color</b>?"}, {"from": "gpt", "value": "blue"}]
    row = {"id": "f1", "image": str(image), "conversations": turns}
    question = {"id": "e1", "question": "What color?", "answer": "red", "prediction": "<script>"}
    answer = TracedAnswer(
        AskedQuestion(image, "What color?", "<script>", question), [TracedRow(row, -0.25)], [TracedRow(row, 2.0)]
    )
    assert answer.as_dict() == question | {
        "harmful": [{"id": "f1", "influence": -0.25}],
        "helpful": [{"id": "f1", "influence": 2.0}],
    }
    image.unlink()  # the page is written nevertheless
    write_influence_page(tmp_path / "page.html", "baseline", {"asked": 5, "wrong": 1, "rows": 9}, [answer], [])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "baseline answers 1 of 5 held-out questions wrongly" in page and "influence −0.25" in page
    assert "What &lt;b&gt;color&lt;/b&gt;?<br>blue" in page and "<script>" not in page
    assert "Statistics and influence" not in page


@pytest.mark.parametrize("truth", [0.0, 0.5, -0.8])
def test_95_of_100_intervals_contain_the_true_correlation(truth):
    """Normal values with correlation r have the rank correlation 6 / π · arcsin(r / 2) (Pearson 1907)."""
    numbers = np.random.default_rng(0)
    normal = 2 * np.sin(np.pi * truth / 6)
    correlations = []
    for _ in range(1000):
        pair = numbers.multivariate_normal([0, 0], [[1, normal], [normal, 1]], size=60)
        correlations.append(correlate_ranks(*pair.T))
        assert correlations[-1].value == spearmanr(pair).statistic
    assert 0.93 < np.mean([correlation.low <= truth <= correlation.high for correlation in correlations]) < 0.97


def test_equal_values_and_few_rows_have_no_rank_correlation():
    assert correlate_ranks([1.0] * 20, range(20)) is None
    assert correlate_ranks(range(9), range(9)) is None
    same = correlate_ranks(range(10), range(10))
    assert (same.value, same.low, same.high, same.count) == pytest.approx((1, 1, 1, 10))


def test_the_page_shows_how_ratings_correlate_with_influence(tmp_path):
    numbers = np.random.default_rng(0)
    influence = {f"f{number}": float(value) for number, value in enumerate(numbers.normal(size=40))}
    ratings = {name: [round(value) + 3.0] for name, value in influence.items()}
    rows = [{"id": name, "rating_relevance": rating, "kind": "given", "same": 1} for name, rating in ratings.items()]
    rows[0]["rating_relevance"] = []  # not rated
    write_jsonl(tmp_path / "stats.jsonl", [*rows, {"id": "not trained on", "rating_relevance": [5.0]}])
    [worth] = rate_statistics(tmp_path / "stats.jsonl", influence)
    names = list(influence)[1:]
    expected = spearmanr([ratings[name][0] for name in names], [influence[name] for name in names]).statistic
    assert (worth.statistic, worth.correlation.count) == ("rating_relevance", 39)
    assert worth.correlation.value == pytest.approx(expected)
    write_influence_page(tmp_path / "page.html", "baseline", {"asked": 5, "wrong": 1, "rows": 40}, [], [worth])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<td>39</td><td>{expected:.2f}</td><td>{worth.correlation.low:.2f} to" in page
