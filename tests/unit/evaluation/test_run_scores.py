"""Means over seeds and paired differences, with their errors and the coverage of their intervals."""

from dataclasses import astuple

import numpy as np
import pytest

from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import estimate_groups, iterate_score_rows
from dj2mgm.evaluation.intervals import Estimate, Measurements
from dj2mgm.evaluation.run_scores import (
    MetricValues,
    RunScores,
    aggregate,
    estimate_differences,
    estimate_paired_difference,
    pair_values,
    read_run_scores,
)
from dj2mgm.storage.files import write_jsonl
from evaluated_runs import write_scores

IMAGES = [f"e{number:03d}" for number in range(120)]


def run(values, seed: int = 0, experiment: str = "baseline", ids=None, counts=None, file="scores.jsonl") -> RunScores:
    """Return scores of one metric from the values of each image (U,)."""
    values = np.asarray(values, dtype=np.float64)
    counts = np.ones(len(values)) if counts is None else np.asarray(counts, dtype=np.float64)
    ids = np.array(IMAGES[: len(values)] if ids is None else ids)
    return RunScores(experiment, seed, {"finetune/own": {"score": MetricValues(ids, values, counts, file)}})


def runs(values, **options) -> list[RunScores]:
    """Return one run for each row of values (S, U)."""
    return [run(row, seed=seed, **options) for seed, row in enumerate(values)]


def score(estimates) -> Estimate:
    return estimates["finetune/own"]["score"]


def draw_metrics(rng, images: int = 40) -> dict[str, dict[str, Measurements]]:
    """Return metrics on own and shuffled images: one value per image, and several for some images."""
    ids = IMAGES[:images]
    several = np.repeat(ids[::2], rng.integers(1, 5, size=len(ids[::2])))
    return {
        f"finetune/{images}": {
            "clip_score": Measurements.from_values(rng.random(len(ids)), ids),
            "accuracy": Measurements.from_values(rng.integers(2, size=len(several)), several),
        }
        for images in ("own", "shuffled")
    }


def test_the_mean_of_one_seed_equals_the_runs_metrics(tmp_path):
    metrics = draw_metrics(np.random.default_rng(0))
    write_jsonl(tmp_path / "scores.jsonl", iterate_score_rows(metrics))
    estimates_by_group = aggregate([read_run_scores("baseline", 0, tmp_path / "scores.jsonl")])
    expected = estimate_groups(metrics)
    assert list(estimates_by_group) == list(expected) == ["finetune/own", "finetune/shuffled", "finetune/difference"]
    for group, estimates in expected.items():
        for metric, estimate in estimates.items():
            assert astuple(estimates_by_group[group][metric]) == pytest.approx(astuple(estimate))
            assert isinstance(estimates_by_group[group][metric].n, int)


def test_values_of_both_evaluations_are_read_together(tmp_path):
    reference = {"reference": {"clip_score": {"a": (1.0, 1), "b": (3.0, 1)}}}
    clip = write_scores(
        tmp_path / "clip.jsonl", {"finetune/own": {"clip_score": {"b": (2.0, 1), "a": (1.0, 1)}}} | reference
    )
    vqa = write_scores(tmp_path / "vqa.jsonl", {"finetune/own": {"vqa_accuracy": {"a": (2.0, 5)}}})
    groups = read_run_scores("baseline", 3, clip, vqa).groups
    assert list(groups) == ["finetune/own", "reference"]
    assert groups["finetune/own"]["clip_score"].ids.tolist() == ["a", "b"]
    assert groups["finetune/own"]["clip_score"].sums.tolist() == [1, 2]
    assert groups["finetune/own"]["vqa_accuracy"].mean == 0.4
    assert groups["reference"]["clip_score"].mean == 2


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scores_that_are_not_numbers_are_refused(tmp_path, value):
    path = write_scores(tmp_path / "scores.jsonl", {"finetune/own": {"accuracy": {"e0": (1, 1), "e1": (value, 1)}}})
    with pytest.raises(InputError, match=r"scores.jsonl: accuracy of image e1 is not a finite number; delete the file"):
        read_run_scores("baseline", 0, path)


def test_results_without_questions_have_no_scores(tmp_path):
    write_jsonl(tmp_path / "scores.jsonl", [])
    assert read_run_scores("baseline", 0, tmp_path / "scores.jsonl").groups == {}


def test_estimate_is_the_mean_of_micro_averages_by_seed():
    values, counts = np.array([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), [3, 1]
    estimate = score(aggregate(runs(values, counts=counts)))
    assert estimate.mean == pytest.approx(np.mean([3 / 4, 2 / 4, 0]))
    assert (estimate.n, estimate.seeds) == (4, 3)


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.7062), (3, 4.30265), (5, 2.77645)])  # values of a printed table
def test_equal_images_have_students_interval_over_seeds(count, quantile):
    means = np.random.default_rng(count).normal(size=count)
    estimate = score(aggregate(runs(np.repeat(means[:, None], 50, axis=1))))
    half_width = quantile * means.std(ddof=1) / np.sqrt(count)
    assert estimate.ends == pytest.approx((means.mean() - half_width, means.mean() + half_width), rel=1e-5)


def test_equal_seeds_have_the_interval_over_images():
    values = np.random.default_rng(1).normal(size=100)
    repeated, alone = score(aggregate(runs([values] * 3))), score(aggregate(runs([values])))
    assert [repeated.mean, *repeated.ends] == pytest.approx([alone.mean, *alone.ends])


def test_interval_covers_the_mean_if_seeds_vary():
    """Each trial draws new images and seeds; most of the variance comes from seeds."""
    rng, covered, covered_by_images = np.random.default_rng(2), [], []
    for _ in range(400):
        noise = rng.normal(scale=0.5, size=(3, 60))
        values = rng.normal(size=60) + rng.normal(scale=0.25, size=(3, 1)) + noise
        estimate = score(aggregate(runs(values)))
        covered.append(estimate.low <= 0 <= estimate.high)
        alone = score(aggregate(runs([values.mean(axis=0)])))
        covered_by_images.append(alone.low <= 0 <= alone.high)
    assert 0.94 <= np.mean(covered) <= 0.995
    assert np.mean(covered_by_images) < 0.9


def test_interval_of_a_difference_covers_it():
    """The difficulty of an image cancels, so the interval is much narrower than the images' spread."""
    rng, covered, widths = np.random.default_rng(3), [], []
    for _ in range(300):
        hardness = rng.normal(scale=5, size=60)
        own, reference = (
            hardness + better + rng.normal(scale=0.1, size=(4, 1)) + rng.normal(scale=0.3, size=(4, 60))
            for better in (0.2, 0)
        )
        estimate = score(estimate_paired_difference(runs(own), runs(reference)))
        covered.append(estimate.low <= 0.2 <= estimate.high)
        widths.append(estimate.high - estimate.low)
    assert 0.94 <= np.mean(covered) <= 0.995
    unpaired = 2 * 1.96 * 5 * np.sqrt(2 / 60)
    assert np.mean(widths) < unpaired / 4


def test_experiments_of_a_page_share_the_noise_between_seeds():
    rng, lengths = np.random.default_rng(6), []
    for _ in range(20):
        reference, *others = rng.normal(size=(4, 2, 1)) + 0.1 * rng.normal(size=(4, 2, 30))
        pages = [pair_values(runs(other), runs(reference)) for other in others]
        together = [score(estimates) for estimates in estimate_differences(pages)]
        alone = [score(estimate_paired_difference(runs(other), runs(reference))) for other in others]
        assert [estimate.mean for estimate in together] == pytest.approx([estimate.mean for estimate in alone])
        assert [estimate.n for estimate in together] == [30] * 3
        lengths.append([np.mean([estimate.high - estimate.low for estimate in side]) for side in (together, alone)])
    shared, own = np.mean(lengths, axis=0)
    assert shared < 0.8 * own


def test_intervals_stay_within_the_range_of_their_metric():
    def rename(made: list[RunScores], metric: str) -> list[RunScores]:
        values = [scores.groups["finetune/own"]["score"] for scores in made]
        groups = ["finetune/own", "finetune/difference"]
        return [
            RunScores(scores.experiment, scores.seed, {group: {metric: value} for group in groups})
            for scores, value in zip(made, values, strict=True)
        ]

    right = runs([[1] * 19 + [0], [0] * 20])
    for metric, low, high in (("vqa_accuracy", 0, 1), ("answer_probability", 0, 1), ("clip_score", 0, None)):
        estimates = aggregate(rename(right, metric))
        assert estimates["finetune/own"][metric].low == low
        assert (estimates["finetune/own"][metric].high == high) == (high is not None)
    estimates = aggregate(rename(runs([[-1] * 19 + [0], [0] * 20]), "answer_log_likelihood"))
    assert estimates["finetune/own"]["answer_log_likelihood"].high == 0
    assert estimates["finetune/difference"]["answer_log_likelihood"].high > 0
    estimates = estimate_paired_difference(
        rename(right, "vqa_accuracy"), rename(runs(np.zeros((2, 20))), "vqa_accuracy")
    )
    assert estimates["finetune/own"]["vqa_accuracy"].ends == (-1, 1)
    assert estimates["finetune/difference"]["vqa_accuracy"].ends == (-2, 2)


def test_the_difference_of_equal_runs_is_zero():
    values = np.random.default_rng(4).random((3, 30))
    difference = score(estimate_paired_difference(runs(values, experiment="again"), runs(values)))
    assert (difference.mean, difference.ends, difference.seeds) == (0, (0, 0), 3)


def test_the_difference_is_antisymmetric():
    rng = np.random.default_rng(5)
    own, reference = runs(rng.random((2, 30))), runs(rng.random((2, 30)))
    forth, back = score(estimate_paired_difference(own, reference)), score(estimate_paired_difference(reference, own))
    assert [forth.mean, forth.low, forth.high] == pytest.approx([-back.mean, -back.high, -back.low])


def test_the_difference_uses_common_seeds_and_images():
    own = [run([5, 6, 7], seed=seed, ids=["b", "c", "d"]) for seed in (2, 1, 9)]
    reference = [run([1, 1, 1], seed=seed, ids=["a", "b", "c"]) for seed in (1, 2, 3)]
    reference[0].groups["reference"] = reference[0].groups["finetune/own"]
    reference[1].groups["reference"] = reference[2].groups["reference"] = reference[0].groups["finetune/own"]
    difference = estimate_paired_difference(own, reference)
    assert list(difference) == ["finetune/own"]
    assert (score(difference).n, score(difference).seeds, score(difference).mean) == (2, 2, 4.5)


def test_order_of_runs_is_irrelevant():
    made = runs(np.random.default_rng(6).random((3, 20)))
    assert astuple(score(aggregate(made))) == pytest.approx(astuple(score(aggregate(made[::-1]))))


def failure(call, *arguments) -> str:
    with pytest.raises(InputError) as error:
        call(*arguments)
    return str(error.value)


def test_runs_that_cannot_be_paired_are_named():
    ours = run([1.0], seed=1, experiment="ours")
    message = failure(estimate_paired_difference, [ours], [run([1.0], seed=2)])
    assert "ours and baseline have no common seed ([1] and [2])" in message
    message = failure(estimate_paired_difference, [ours], [run([1.0], seed=1, ids=["other"])])
    assert "ours and baseline have no common evaluation image" in message
    message = failure(estimate_paired_difference, [ours], [run([1.0], seed=1, counts=[3], file="old/scores.jsonl")])
    assert "image e000 has 1 values in scores.jsonl and 3 in old/scores.jsonl" in message


def test_runs_of_one_experiment_need_the_same_images():
    first, other = run([1.0, 2.0]), run([1.0], seed=7, file="seed-7/scores.jsonl")
    for message in (failure(aggregate, [first, other]), failure(estimate_paired_difference, [first], [first, other])):
        assert "baseline with seed 7: score of finetune/own in seed-7/scores.jsonl has other images" in message
    lacking = RunScores("baseline", 8, {})
    assert "baseline with seed 0 has score of finetune/own (scores.jsonl), but baseline with seed 8 does" in failure(
        aggregate, [lacking, first]
    )
