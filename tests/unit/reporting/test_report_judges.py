"""Notes on the judges of captions, and the agreement of two judges."""

from dataclasses import replace

import numpy as np
import pytest

from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import estimate_paired_difference
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.rendering import Cell
from dj2mgm.reporting.sections.judge_section import (
    describe_agreement,
    describe_judges,
    describe_rank_correlation,
    measure_judge_agreement,
)
from report_pages import read_page_text, write_report
from report_results import IMAGES, write_photos, write_results
from second_judges import add_second_judge, change_judges


@pytest.fixture
def config(tmp_path):
    return write_results(tmp_path)


def test_a_note_names_a_judge_that_selected_the_data(monkeypatch, config, tmp_path):
    title = "The judge also selected the data of dj_synth, "
    text = read_page_text(write_report(monkeypatch, config))
    assert text.count(title) == 1  # one panel is of CLIP scores
    assert "Agreement of the judges" not in text and "second judge" not in text and "Judge: " not in text
    change_judges(config, "dj_synth", lambda judges: [judge | {"selects": []} for judge in judges])
    assert describe_judges(load_experiments(config)) == [""]
    assert "The judge also" not in read_page_text(write_report(monkeypatch, write_photos(tmp_path / "photos")))


def test_a_note_names_a_judge_that_shares_its_image_tower(config):
    for name in ("baseline", "dj_synth"):
        change_judges(config, name, lambda judges: [judge | {"selects": [], "sees": True} for judge in judges])
    [note] = describe_judges(load_experiments(config))
    assert note.startswith("The judge shares its image tower with the trained models of baseline and dj_synth, ")


def test_second_judge_has_scores_and_agreement(monkeypatch, config):
    add_second_judge(config, lambda value, row: value / 10)
    text = read_page_text(write_report(monkeypatch, config))
    assert "CLIPScore, second judge" in text and "Judge: models/siglip (SigLIP)." in text
    assert "captions judged by models/clip (CLIP) and models/siglip (SigLIP)" in text
    experiments = load_experiments(config)
    differences = {"dj_synth": estimate_paired_difference(experiments[1].scores, experiments[0].scores)}
    agreement = measure_judge_agreement(experiments, differences)
    assert {row.cells[-1].text for row in agreement.correlations.rows} == {"1.00"}
    captions = [row.cells[-2].text for row in agreement.correlations.rows]
    assert captions == [str(2 * IMAGES)] * 4  # two seeds; two models each
    assert [(row.head, row.cells[0].text) for row in agreement.contrasts.rows] == [
        ("dj_synth", "Fine-tuned"),
        ("dj_synth", "Pretrained"),
    ]
    assert {row.cells[-1] for row in agreement.contrasts.rows} == {Cell("both: better", css_class="better")}


def test_contradicting_judges_are_reported(config):
    add_second_judge(config, lambda value, row: 3 - value)
    experiments = load_experiments(config)
    differences = {"dj_synth": estimate_paired_difference(experiments[1].scores, experiments[0].scores)}
    agreement = measure_judge_agreement(experiments, differences)
    assert {row.cells[-1].text for row in agreement.correlations.rows} == {"−1.00"}
    assert {row.cells[-1] for row in agreement.contrasts.rows} == {Cell("contradictory: better, worse")}


def test_rank_correlation_equals_spearmans(config):
    scores_by_id = {}
    add_second_judge(
        config, lambda value, row: float(scores_by_id.setdefault(row["id"], (7 * len(scores_by_id)) % IMAGES))
    )
    [first, *_] = load_experiments(config)
    runs = first.scores[:1]
    scores = runs[0].groups["finetune/own"]
    scores["clip_score"].sums[:] = np.random.default_rng(0).permutation(IMAGES)
    first_scores, second_scores = (scores[name].sums for name in ("clip_score", "second_clip_score"))
    # of ranks without ties
    by_formula = 1 - 6 * ((first_scores - second_scores) ** 2).sum() / (IMAGES * (IMAGES**2 - 1))
    assert describe_rank_correlation(runs, "finetune/own", "clip_score") == (IMAGES, pytest.approx(by_formula))
    for name in ("clip_score", "second_clip_score"):
        scores[name].counts[0] *= 3  # three captions of the first image, with the same mean score
        scores[name].sums[0] *= 3
    assert describe_rank_correlation(runs, "finetune/own", "clip_score") == (IMAGES + 2, pytest.approx(by_formula))
    scores["clip_score"].sums[:] = scores["clip_score"].counts
    assert np.isnan(describe_rank_correlation(runs, "finetune/own", "clip_score")[1])


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((0.1, 0.3), (0.2, 0.4), "both: better"),
        ((0.1, 0.3), (-0.4, -0.2), "contradictory: better, worse"),
        ((0.1, 0.3), (-0.1, 0.2), "only the first: better; the signs agree"),
        ((-0.2, 0.1), (0.1, 0.3), "only the second: better; the signs differ"),
        ((-0.2, 0.1), (-0.3, 0.1), "neither shows a difference; the signs agree"),
        ((-0.1, 0.2), (-0.2, 0.1), "neither shows a difference; the signs differ"),
    ],
)
def test_agreement_counts_intervals_and_signs(first, second, words):
    pair = [Estimate(9, 9, 2, (low + high) / 2, low, high) for low, high in (first, second)]
    assert describe_agreement("clip_score", *pair)[0] == words
    one_seed = describe_agreement("clip_score", *(replace(estimate, seeds=1) for estimate in pair))[0]
    assert ("for these two models" in one_seed) == ("better" in words or "worse" in words)
