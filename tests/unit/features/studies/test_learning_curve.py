"""Power laws: exact laws are extrapolated, and intervals have their nominal coverage of new runs."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit

from dj2mgm.evaluation.run_scores import MetricValues
from dj2mgm.features.studies.learning_curves import LearningCurve, estimate_least_noise

SHARES = np.array([0.125, 0.25, 0.5, 1.0])


@pytest.mark.parametrize("exponent", [0.3, 0.7])
def test_extrapolation_equals_least_squares(exponent):
    rows = 4000 * np.geomspace(0.1, 1, 8)
    rng = np.random.default_rng(1)
    scores = 0.8 - 0.1 * (rows / 4000) ** -exponent + 1e-3 * rng.standard_normal(8)
    fitted, _ = curve_fit(lambda x, a, b, c: a - b * x**-c, rows / 4000, scores, p0=(0.8, 0.1, 0.5))
    expected = fitted[0] - fitted[1] * 2.0 ** -fitted[2]
    curve = LearningCurve(rows, scores)
    prediction = curve.predict_score(8000)
    assert prediction.median == pytest.approx(expected, abs=3e-3) and prediction.low < expected < prediction.high
    assert curve.predict_gain(8000).median == pytest.approx(expected - (fitted[0] - fitted[1]), abs=3e-3)


@pytest.mark.parametrize("seeds", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_intervals_contain_80_percent_of_new_runs(seeds):
    rng, inside = np.random.default_rng(0), []
    for _ in range(100):
        exponent, height, noise = rng.uniform(0.15, 1.2), rng.uniform(0.02, 0.15), rng.choice([0.005, 0.02])
        shares = np.repeat([*SHARES, 2.0], [seeds] * 4 + [1])
        scores = 0.7 - height * shares**-exponent + noise * rng.standard_normal(len(shares))
        prediction = LearningCurve(1000 * shares[:-1], scores[:-1]).predict_score(2000)
        inside.append(prediction.low <= scores[-1] <= prediction.high)
    assert np.mean(inside) >= 0.72, "noise of 100 cases"


SHAPES = {
    "power law": lambda x: 0.7 - 0.1 * x**-0.4,
    "logarithm": lambda x: 0.6 + 0.06 * np.log2(x),
    "saturation": lambda x: 0.6 + 0.1 * np.minimum(0, np.log2(2 * x)) / 3,
    "fall": lambda x: 0.7 - 0.1 * ((np.log2(x) + 1) / 2) ** 2,
    "constant": lambda x: 0.6 + 0 * x,
}


def simulate_shape(shape: str, noise: float, seeds: int, studies: int) -> tuple[float, ...]:
    """Return the share of fits, of those the covered new runs and gains, and of all studies the wrong advice.

    Advice to use more rows is wrong if the interval of the gain is above zero, and the true gain is not.
    """
    rng, score, outcomes = np.random.default_rng(seeds), SHAPES[shape], []
    for _ in range(studies):
        shares = np.repeat([*SHARES, 2.0], [seeds] * 4 + [1])
        scores = score(shares) + noise * rng.standard_normal(len(shares))
        curve = LearningCurve(1000 * shares[:-1], scores[:-1], noise if seeds == 1 else 0.0)
        run, gain, true_gain = curve.predict_score(2000), curve.predict_gain(2000), score(2.0) - score(1.0)
        covered = run.low <= scores[-1] <= run.high, gain.low <= true_gain <= gain.high
        outcomes.append((curve.fits, *covered, curve.fits and gain.low > 0 >= true_gain))
    fits, run_covered, gain_covered, wrong = np.array(outcomes, dtype=float).T
    return fits.mean(), run_covered @ fits / max(1, fits.sum()), gain_covered @ fits / max(1, fits.sum()), wrong.mean()


@pytest.mark.parametrize(("shape", "seeds"), [("logarithm", 1), ("fall", 3)])
def test_other_shapes_are_covered_or_not_extrapolated(shape, seeds):
    fits, run_covered, gain_covered, wrong = simulate_shape(shape, 0.005, seeds, 60)
    assert wrong <= 0.05
    if shape == "fall":
        assert fits <= 0.3
    else:
        assert min(run_covered, gain_covered) >= 0.70, "noise of 60 studies"


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.005, 0.02])
@pytest.mark.parametrize("seeds", [1, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes(shape, seeds, noise):
    fits, run_covered, gain_covered, wrong = simulate_shape(shape, noise, seeds, 400)
    assert wrong <= 0.04
    if shape != "fall":
        assert gain_covered >= 0.85 and run_covered >= (0.70 if shape == "saturation" else 0.76), "noise of 400 studies"
    if shape in ("power law", "logarithm"):
        assert fits >= 0.92


def test_a_fit_needs_four_numbers_of_rows():
    assert not LearningCurve([1, 1, 2, 4], [0.1, 0.1, 0.2, 0.25], 0.01).fits
    assert LearningCurve(1000 * SHARES, 0.7 - 0.1 * SHARES**-0.5).fits, "exact laws need no noise"
    with pytest.raises(ValueError, match="4 runs on 2 numbers of rows are too few"):
        LearningCurve([1, 1, 2, 2], [0, 0, 0, 0])


def test_intervals_allow_for_runs_on_a_law_by_chance():
    """Seeds have no noise here: a run's errors on different images are independent."""
    rng, inside, exact = np.random.default_rng(1), [], []
    for _ in range(40):
        shares = np.array([*SHARES, 2.0])
        images = 0.7 - 0.1 * shares[:, None] ** -0.5 + 0.1 * rng.standard_normal((5, 100))
        scores, runs = images.mean(axis=1), [make_run(values) for values in images[:-1]]
        prediction = LearningCurve(1000 * SHARES, scores[:-1], estimate_least_noise(runs)).predict_score(2000)
        inside.append(prediction.low <= scores[-1] <= prediction.high)
        shorter = LearningCurve(1000 * SHARES, scores[:-1]).predict_score(2000)
        exact.append(shorter.low <= scores[-1] <= shorter.high)
    assert np.mean(inside) >= 0.75 and np.mean(inside) >= np.mean(exact), "noise of 40 cases"


def test_least_noise_equals_the_two_way_analysis_of_variance():
    rng = np.random.default_rng(2)
    images = rng.standard_normal((4, 1)) + rng.standard_normal((1, 30)) + 0.1 * rng.standard_normal((4, 30))
    residuals = images - images.mean(axis=0) - images.mean(axis=1, keepdims=True) + images.mean()
    expected = np.sqrt((residuals**2).sum() / (3 * 29) / 30)
    assert estimate_least_noise([make_run(values) for values in images]) == pytest.approx(expected, rel=1e-9)
    assert estimate_least_noise([make_run(values) for values in images[:, :1]]) == 0


def make_run(values):
    """Return a run with one value for each image."""
    ids = np.array([f"e{number:03}" for number in range(len(values))])
    return MetricValues(ids, np.asarray(values), np.ones(len(values)), Path("scores.jsonl"))


def test_constant_scores_predict_no_gain():
    gain = LearningCurve(1000 * SHARES, [0.5] * 4).predict_gain(2000)
    assert max(map(abs, (gain.median, gain.low, gain.high))) < 1e-4
