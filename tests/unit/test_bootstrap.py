import itertools

import numpy as np
import pytest

from evaluation.bootstrap import DRAWS_AT_ONCE, Measurements, bootstrap_mean, bootstrap_means


def independent(values) -> Measurements:
    return Measurements.of(values, [str(index) for index in range(len(values))])


def test_interval_equals_the_enumeration_of_every_resample():
    values = [0.0, 1.0, 5.0]
    all_means = np.mean(list(itertools.product(values, repeat=3)), axis=1)
    result = bootstrap_mean(independent(values), samples=20_000, seed=1, confidence=0.8)
    assert (result["n"], result["mean"]) == (3, 2.0)
    assert [result["low"], result["high"]] == pytest.approx(np.quantile(all_means, [0.1, 0.9]), abs=1e-9)


def test_interval_approaches_the_normal_one_for_many_values():
    values = np.random.default_rng(0).gamma(2.0, size=4000)
    half = 1.96 * values.std() / np.sqrt(len(values))
    result = bootstrap_mean(independent(values), samples=4000, seed=0)
    assert result["low"] == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert result["high"] == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_interval_covers_the_true_mean_about_95_times_in_100():
    rng = np.random.default_rng(3)
    results = [bootstrap_mean(independent(rng.normal(size=100)), 400, seed=trial) for trial in range(400)]
    covered = np.mean([result["low"] <= 0 <= result["high"] for result in results])
    assert 0.91 <= covered <= 0.98


def test_repeating_each_value_inside_its_unit_adds_no_certainty():
    values, units = np.random.default_rng(0).random(50), [str(index) for index in range(50)]
    once = bootstrap_mean(Measurements.of(values, units), 500, seed=0)
    repeated = bootstrap_mean(Measurements.of(np.repeat(values, 7), np.repeat(units, 7)), 500, seed=0)
    assert repeated["n"] == 350
    assert [repeated[key] for key in ("mean", "low", "high")] == pytest.approx(
        [once[key] for key in ("mean", "low", "high")]
    )


def test_units_of_different_size_weigh_by_their_values():
    result = bootstrap_mean(Measurements.of([1, 1, 1, 0], ["a", "a", "a", "b"]), 2000, seed=0)
    assert result["mean"] == 0.75
    assert (result["low"], result["high"]) == (0.0, 1.0)


def test_same_seed_same_interval_and_order_of_rows_is_irrelevant():
    values, units = np.random.default_rng(5).random(40), np.repeat([f"u{i}" for i in range(10)], 4)
    order = np.random.default_rng(6).permutation(40)
    first = bootstrap_mean(Measurements.of(values, units), 300, seed=9)
    again = bootstrap_mean(Measurements.of(values[order], units[order]), 300, seed=9)
    other = bootstrap_mean(Measurements.of(values, units), 300, seed=10)
    assert first == pytest.approx(again)
    assert first["low"] != other["low"]


def test_memory_stays_bounded_when_units_are_many():
    units = DRAWS_AT_ONCE // 4
    result = bootstrap_mean(independent(np.arange(units) % 2), samples=9, seed=0)  # three rounds of draws
    assert result["low"] < result["mean"] == 0.5 < result["high"]


def test_metrics_that_are_resampled_together_get_the_same_draws_as_alone():
    rng = np.random.default_rng(7)
    counts = rng.integers(1, 5, size=(4, 30)).astype(float)
    sums = rng.random((4, 30)) * counts
    together = bootstrap_means(sums, counts, samples=50, seed=3)
    assert together.shape == (50, 4)
    for metric in range(4):
        alone = bootstrap_means(sums[metric : metric + 1], counts[metric : metric + 1], samples=50, seed=3)
        assert together[:, metric] == pytest.approx(alone[:, 0])
    drawn = np.random.default_rng(3).integers(30, size=(50, 30))
    assert together == pytest.approx(np.array([sums[:, row].sum(1) / counts[:, row].sum(1) for row in drawn]))


def test_difference_is_paired_and_refuses_other_units():
    difference = Measurements.of([3, 5], ["a", "b"]) - Measurements.of([1, 4], ["a", "b"])
    assert difference.values.tolist() == [2, 1]
    with pytest.raises(ValueError, match="same units"):
        Measurements.of([1], ["a"]) - Measurements.of([1], ["b"])


def test_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean(independent([]), 10, seed=0)
