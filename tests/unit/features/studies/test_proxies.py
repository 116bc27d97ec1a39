"""Certificates of cheap proxies: shares of pairs, exact intervals and the rule for their use."""

import numpy as np
import pytest
from scipy.stats import beta, kendalltau

from dj2mgm.features.studies import proxies
from dj2mgm.features.studies.proxies import build_mixture_table, build_proxy_table, measure_agreement
from dj2mgm.features.studies.study_records import (
    MixtureScores,
    ScoredMixture,
    ShownSearch,
    ShownTrial,
    StudyPageSettings,
)
from dj2mgm.reporting.comparison import find_headline
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_jsonl, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_shares_equal_kendalls_and_intervals_a_jackknife(noise):
    numbers = np.random.default_rng(0)
    own = numbers.standard_normal(24)
    measured = own + noise * numbers.standard_normal(24)
    agreement = measure_agreement(dict(enumerate(measured)), dict(enumerate(own)))
    share = (1 + kendalltau(own, measured).statistic) / 2
    assert agreement.pairs == 276 and agreement.share == pytest.approx(share)
    without_one = [(1 + kendalltau(np.delete(own, n), np.delete(measured, n)).statistic) / 2 for n in range(24)]
    pairs = np.clip(share * (1 - share) / (23 * np.var(without_one)), 12, 276) if noise else 276
    assert agreement.low == pytest.approx(beta.ppf(0.025, share * pairs, (1 - share) * pairs + 1))
    assert agreement.high == pytest.approx(beta.ppf(0.975, share * pairs + 1, (1 - share) * pairs) if noise else 1.0)
    assert agreement.use == ("used" if agreement.low >= 0.75 else "not used")


def measure_coverage(variants: int, share: float, studies: int) -> tuple[float, float]:
    """Return how many intervals contain the true share, and how many proxies are used."""
    rng, correlation = np.random.default_rng(variants), np.sin(np.pi * (share - 0.5))
    outcomes = []
    for _ in range(studies):
        truth, noise = rng.standard_normal((2, variants))
        proxy = correlation * truth + np.sqrt(1 - correlation**2) * noise
        agreement = measure_agreement(dict(enumerate(proxy)), dict(enumerate(truth)))
        outcomes.append((agreement.low <= share <= agreement.high, agreement.use == "used"))
    covered, used = np.mean(outcomes, axis=0)
    return covered, used


@pytest.mark.parametrize(
    ("variants", "studies"),
    [(6, 400), (20, 400), *(pytest.param(number, 2000, marks=pytest.mark.slow) for number in (4, 6, 8, 12, 20, 40))],
)
def test_intervals_cover_the_share_of_dependent_pairs(variants, studies):
    for share in (0.6, 0.75, 0.9):
        covered, used = measure_coverage(variants, share, studies)
        assert covered >= 0.94 and (used <= (0.05 if studies < 1000 else 0.04) or share > 0.75), share


def test_ties_in_the_truth_are_not_counted():
    truth = {"a": 1.0, "b": 1.0, "c": 2.0, "alone": 3.0}
    agreement = measure_agreement({"a": 0.0, "b": 0.5, "c": 0.5, "other": 9.0}, truth)
    assert (agreement.right, agreement.pairs) == (1, 2) and agreement.use == "not used"
    assert measure_agreement({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}) is None
    few = measure_agreement({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2})
    assert (few.share, few.use) == (1.0, "not used: too few pairs")


@pytest.fixture
def variants(tmp_path):
    """Write five variants of rising quality, with equal caption scores and the most similar data in the worst one."""
    dataset, entries = write_dataset(tmp_path / "datasets/shapes"), []
    for index in range(5):
        images = {f"e{n}": (0.1 * index + 0.01 * n, 1) for n in range(8)}
        vqa = {"finetune/own": {"answer_probability": images, "answer_log_likelihood": images}}
        clip = {"finetune/own": {"clip_score": dict.fromkeys(images, (0.5, 1))}}
        run = write_run(tmp_path / f"v{index}", clip, vqa, filtered=50 + index)
        similar = [
            {"id": "a", "image_text_similarity": [1 / (1 + index)], "rating_relevance": [1 + index]},
            {"id": "unrated", "rating_relevance": []},
            {"id": "b", "image_text_similarity": [index]},
        ]
        write_jsonl(tmp_path / f"v{index}/filter/stats.jsonl", similar)
        events = [{"id": "a", "event": "changed"}, {"id": "b", "event": "dropped"}]
        write_jsonl(tmp_path / f"v{index}/filter/dropped.jsonl", events)
        write_jsonl(tmp_path / f"v{index}/finetune/scores.jsonl", [{"step": 1, "loss": -index}, {"step": 4, "loss": 0}])
        entries.append(build_entry(f"v{index}", dataset, {0: run}))
    write_yaml(tmp_path / "config.yaml", {"experiments": entries})
    assert load_settings(StudyPageSettings, tmp_path / "config.yaml")
    return load_experiments(tmp_path / "config.yaml")


def test_every_proxy_of_the_runs_has_a_row(variants):
    trials = [ShownTrial(name=f"v{n}", changes={}, scores=[float(n != 1), 0.0]) for n in range(4)]
    trials.append(ShownTrial(name="dropped early", changes={}, scores=[9.0, None]))
    search = ShownSearch(progress="", rungs=[0.5, 1.0], trials=trials)
    [table] = build_proxy_table(variants, find_headline(variants), search)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["gain in log-likelihood of the right answer over a shuffled image (nats) after a short training"] == [
        *("50 % of the rows", "2 of 6", "33 %", "0 to 96 %", "not used"),
    ]
    assert rows["loss on held-out answers at the first checkpoint"][:2] == ["25 % of stage 2", "10 of 10"]
    assert rows["log-likelihood of the right answer (nats)"][:3] == ["whole run", "10 of 10", "100 %"]
    assert rows["CLIPScore"][1:3] == ["0 of 10", "0 %"], "equal scores order nothing"
    assert rows["share of rows that the recipes keep"][1] == "10 of 10"
    assert rows["mean similarity of the rows that the recipes keep"] == [
        *("no training", "0 of 10", "0 %", "0 to 31 %", "not used"),
    ]
    assert rows["mean rating of relevance of the rows that the recipes keep"][:3] == [
        "no training",
        "10 of 10",
        "100 %",
    ]
    assert not any("likelihood gain" in title for title in rows), "no recipe measures it"
    assert build_proxy_table(variants[:2], find_headline(variants), None) == [], "one pair is no agreement"


def mixture_scores(variants, order: list[float]) -> MixtureScores:
    """Return scores of merged models: of each variant in this order, and of two mixtures that are not trained."""
    mixtures = [
        ScoredMixture(shares={"a": 0.1 * index, "b": 1 - 0.1 * index}, variant=variant.name, score=score)
        for index, (variant, score) in enumerate(zip(variants, order, strict=True))
    ]
    mixtures += [ScoredMixture(shares={"a": share, "b": 1 - share}, score=share) for share in (0.95, 0.05)]
    return MixtureScores(sources=2, mixtures=mixtures)


def test_mixtures_are_ranked_only_if_merging_orders_enough_pairs(variants, monkeypatch):
    headline = find_headline(variants)
    monkeypatch.setattr(proxies, "MIN_ORDERED", 0.6)  # ten pairs in the right order have a lower limit of 69 %
    merged = mixture_scores(variants, [0.1, 0.2, 0.3, 0.4, 0.5])
    [table] = build_proxy_table(variants, headline, None, merged)
    assert table.rows[0][:4] == ["merged LoRAs of the single sources", "2 trainings for all", "10 of 10", "100 %"]
    [table] = build_mixture_table(variants, headline, merged)
    assert table.rows[0] == ["a 95 %, b 5 %", "95.0 %", "–"], "the best mixture is not trained"
    assert table.rows[1] == ["a 40 %, b 60 %", "50.0 %", "43.5 %"] and len(table.rows) == 7
    reverse = mixture_scores(variants, [0.5, 0.4, 0.3, 0.2, 0.1])
    assert build_mixture_table(variants, headline, reverse) == [] == build_mixture_table(variants, headline, None)
    [table] = build_proxy_table(variants, headline, None, reverse)
    assert table.rows[0][2] == "0 of 10" and table.rows[0][-1] == "not used"
