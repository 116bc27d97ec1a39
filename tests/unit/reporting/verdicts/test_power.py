"""Power of a comparison before its runs."""

import numpy as np
import pytest
from scipy import stats

from dj2mgm.evaluation.contrasts import PairedValues, contrast_with_reference
from dj2mgm.reporting.verdicts.decision_cost import (
    FinishedRun,
    Noise,
    compute_expected_contrast,
    find_noise,
)
from noisy_runs import build_power_settings, write_finished_runs


def measure_noise(runs: dict[str, list[FinishedRun]], headline: str = "answer_probability") -> Noise | None:
    return find_noise(build_power_settings(runs, headline=headline), "finetune/own", headline)


def test_noise_is_estimated_from_finished_runs(tmp_path):
    noise = measure_noise(write_finished_runs(tmp_path, {"baseline": 0.5, "other": 0.6, "third": 0.4}, seeds=8))
    assert noise.image_noise == pytest.approx(0.1 * np.sqrt(2), rel=0.1)
    assert noise.seed_noise == pytest.approx(0.02 * np.sqrt(2), rel=0.3)
    assert noise.sources[1].endswith("points between seeds (measured on other and third)")


def test_unknown_noise_is_completed_by_a_typical_one(tmp_path):
    one_seed = measure_noise(write_finished_runs(tmp_path / "a", {"baseline": 0.5, "other": 0.6}, seeds=1))
    assert one_seed.image_noise == pytest.approx(0.14, rel=0.15) and "between seeds (typical)" in one_seed.sources[1]
    alone = measure_noise(write_finished_runs(tmp_path / "b", {"baseline": 0.5}, seeds=8))
    assert "per image (typical)" in alone.sources[0] and "(measured on baseline)" in alone.sources[1]
    assert alone.seed_noise == pytest.approx(0.02 * np.sqrt(2), rel=0.5)
    others = measure_noise(write_finished_runs(tmp_path / "c", {"other": 0.5, "third": 0.6}, seeds=1))
    assert "per image (typical)" in others.sources[0], "a difference from another experiment than the reference"
    assert measure_noise({}).sources == ("8.0 points per image (typical)", "0.4 points between seeds (typical)")
    assert measure_noise({}, headline="clip_score") is None


def test_stated_difference_is_shown_in_four_of_five_studies():
    """Compare with a simulated Student's test over seeds, which equals the interval for many images."""
    truth = compute_expected_contrast(Noise(1e-6, 0.02, ("", "")), 500, seeds=4).compute_detectable()
    draws = np.random.default_rng(1).normal(truth, 0.02, size=(20_000, 4))
    assert np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.01)


def test_power_and_report_state_the_same_difference(tmp_path):
    """Draw two seeds as noisy as a mean over the images, whose estimate is too small in two of three cases."""
    rng = np.random.default_rng(6)
    ratios = []
    for _ in range(40):
        values = rng.normal(size=(2, 1)) / np.sqrt(500) + rng.normal(size=(1, 500))
        [contrast] = contrast_with_reference([PairedValues((0, 1), values, np.ones(500))])
        image_noise, seed_noise = np.sqrt(contrast.image_variance * 500), np.sqrt(contrast.seed_variance * 2)
        noise = Noise(float(image_noise), float(seed_noise), ("", ""), seed_df=1)
        contrasts = [compute_expected_contrast(noise.at_quantile(share), 500, 2) for share in (0.5, 0.1, 0.9)]
        ratios.append(np.divide([c.compute_detectable() for c in contrasts], contrast.estimate_detectable()))
    assert np.median(ratios, axis=0) == pytest.approx([1, 1, 1], rel=0.05)
    assert (
        measure_noise(write_finished_runs(tmp_path, {"baseline": 0.5, "other": 0.6, "third": 0.4}, seeds=2)).seed_df
        == 1
    )
