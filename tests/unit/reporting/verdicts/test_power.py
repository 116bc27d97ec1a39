"""Power of a comparison before its runs."""

import re

import numpy as np
import pytest
from scipy import stats

from dj2mgm.evaluation.contrasts import contrast_with_reference
from dj2mgm.evaluation.paired_values import PairedValues
from dj2mgm.reporting.verdicts.power import (
    FinishedRun,
    Noise,
    PowerSettings,
    compute_expected_contrast,
    describe_power,
    find_noise,
)
from dj2mgm.storage.files import write_text
from evaluated_runs import write_scores

IMAGES = [f"e{number:03d}" for number in range(200)]


def finished(folder, levels: dict[str, float], seeds: int) -> dict[str, list[FinishedRun]]:
    """Write runs with standard deviations of 0.1 per image and of 0.02 between seeds, for each side."""
    rng = np.random.default_rng(0)
    difficulty, runs = rng.normal(size=len(IMAGES)), {}
    for name, level in levels.items():
        own, runs[name] = 0.1 * rng.normal(size=len(IMAGES)), []
        for seed in range(seeds):
            values = level + 0.2 * difficulty + own + 0.02 * rng.normal()
            by_image = {image: (float(value), 1) for image, value in zip(IMAGES, values, strict=True)}
            run = folder / name / str(seed)
            write_scores(run / "evaluate_vqa/scores.jsonl", {"finetune/own": {"answer_probability": by_image}})
            write_scores(run / "evaluate_clip/scores.jsonl", {"finetune/own": {"clip_score": by_image}})
            write_text(run / "evaluate_vqa/x.benchmark.tsv", "s\th:m:s\n600\t0:10:00\n")
            stages = {stage: str(run / stage) for stage in ("evaluate_vqa", "evaluate_clip")}
            runs[name].append(FinishedRun(seed=seed, stages=stages, time=0.0))
    return runs


def settings(runs: dict[str, list[FinishedRun]], **keys) -> PowerSettings:
    own = {"headline": "answer_probability", "experiment": "other", "images": 200, "images_are_known": True, "seeds": 1}
    return PowerSettings(**own | keys, finished=runs)


def measure_noise(runs: dict[str, list[FinishedRun]], headline: str = "answer_probability") -> Noise | None:
    return find_noise(settings(runs, headline=headline), "finetune/own", headline)


def test_noise_is_estimated_from_finished_runs(tmp_path):
    noise = measure_noise(finished(tmp_path, {"baseline": 0.5, "other": 0.6, "third": 0.4}, seeds=8))
    assert noise.image_noise == pytest.approx(0.1 * np.sqrt(2), rel=0.1)
    assert noise.seed_noise == pytest.approx(0.02 * np.sqrt(2), rel=0.3)
    assert noise.sources[1].endswith("points between seeds (measured on other and third)")


def test_unknown_noise_is_completed_by_a_typical_one(tmp_path):
    one_seed = measure_noise(finished(tmp_path / "a", {"baseline": 0.5, "other": 0.6}, seeds=1))
    assert one_seed.image_noise == pytest.approx(0.14, rel=0.15) and "between seeds (typical)" in one_seed.sources[1]
    alone = measure_noise(finished(tmp_path / "b", {"baseline": 0.5}, seeds=8))
    assert "per image (typical)" in alone.sources[0] and "(measured on baseline)" in alone.sources[1]
    assert alone.seed_noise == pytest.approx(0.02 * np.sqrt(2), rel=0.5)
    others = measure_noise(finished(tmp_path / "c", {"other": 0.5, "third": 0.6}, seeds=1))
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
    assert measure_noise(finished(tmp_path, {"baseline": 0.5, "other": 0.6, "third": 0.4}, seeds=2)).seed_df == 1


def test_plan_states_power_and_the_time_of_a_seed(tmp_path):
    text = describe_power(settings(finished(tmp_path, {"baseline": 0.5, "other": 0.6}, seeds=3)))
    assert text.startswith(
        "Power: how small a true difference would four of five comparisons find, on 200 held-out images? In the "
    )
    assert " points with 2 seeds, " in text and " points with 10.\n" in text
    assert "With 2 seeds, the smallest difference may be " in text and " (80 % interval)." in text
    assert "Your configuration has one seed. " in text
    assert "One more seed of other and baseline takes about 20 min 00 s, as measured" in text
    one_seed = describe_power(settings(finished(tmp_path / "one", {"other": 0.6}, seeds=1)))
    assert "One more seed of other takes about 10 min 00 s, as measured" in one_seed, (
        "without the baseline, which has not run"
    )
    first = describe_power(settings({}, images=500, images_are_known=False, seeds=4))
    assert "500 held-out images (assumed, since the dataset is not made yet)" in first
    assert re.findall(r" with (\d+)", first) == ["2", "3", "4", "5", "10"]
    assert "is known after a first run" in first
    assert describe_power(settings({}, headline="clip_score")) == (
        "Power: the noise of the CLIPScore is not known before a first run.\n"
    )
