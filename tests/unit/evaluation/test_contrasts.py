"""Contrasts compared with simulated pages and textbook formulas, and their verdicts."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dj2mgm.evaluation.contrast_verdicts import VERDICT_LEVEL, apply_holm_correction, compute_verdict, decide
from dj2mgm.evaluation.contrasts import PairedContrast, PairedValues, contrast_with_base, contrast_with_reference
from dj2mgm.evaluation.intervals import LEVEL
from median_estimates import draw_median

DOMINATED = {"images": 0.25, "seeds": 4.0}  # standard deviation of seeds relative to that of a mean over images
NoiseOf = Callable[[np.random.Generator, int], np.ndarray]


def equal_noise(rng: np.random.Generator, runs: int) -> np.ndarray:
    return np.ones(runs)


def twofold_noise(rng: np.random.Generator, runs: int) -> np.ndarray:
    """Return standard deviations from 1 to 2 for the reference and the experiments, in random order."""
    return rng.permutation(np.linspace(1, 2, runs))


def simulate(
    rng: np.random.Generator,
    studies: int,
    seeds: int,
    images: int,
    ratio: float,
    experiments: int = 3,
    noise: NoiseOf = equal_noise,
    truth: float = 0.0,
) -> list[PairedContrast]:
    """Draw scores of runs on images, and return the contrasts of experiments whose true difference is `truth`.

    A score is the sum of the image's difficulty, its own difficulty for the experiment, the seed's effect on all
    experiments, training noise of the run, and noise of the single score.
    """

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((studies, *shape), dtype=np.float32)

    difficulty, seed_effect = 2 * normal(1, images), normal(seeds, 1)
    shares = np.array([noise(rng, experiments + 1) for _ in range(studies)], dtype=np.float32)
    training = ratio / np.sqrt(images) * shares[:, :, None, None] * normal(experiments + 1, seeds, 1)
    scores = [
        difficulty + seed_effect + training[:, number] + normal(1, images) + 0.3 * normal(seeds, images)
        for number in range(experiments + 1)
    ]
    counts = np.ones(images)
    numbers = tuple(range(seeds))
    return contrast_with_reference([PairedValues(numbers, own + truth - scores[0], counts) for own in scores[1:]])


def coverage(contrasts: list[PairedContrast], truth: float = 0.0) -> float:
    return float(np.mean([np.abs(contrast.mean - truth) <= contrast.compute_half_width() for contrast in contrasts]))


def measure_coverage(rng, studies: int, batch: int, **scenario) -> float:
    return float(np.mean([coverage(simulate(rng, batch, **scenario)) for _ in range(studies // batch)]))


def each_size(quick: set[tuple], *values: list) -> list:
    """Return all combinations of values, and mark the slow ones."""
    return [
        case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(*values)
    ]


@pytest.mark.parametrize("noise", [equal_noise, twofold_noise], ids=["equal", "twofold"])
@pytest.mark.parametrize(
    ("seeds", "images", "experiments"), each_size({(2, 20, 5), (3, 100, 2)}, [2, 3, 5, 10], [20, 100, 500], [2, 5])
)
def test_pooled_intervals_cover_the_truth(seeds, images, experiments, noise):
    for dominated, ratio in DOMINATED.items():
        rng = np.random.default_rng([seeds, images, experiments])
        scenario = {"seeds": seeds, "images": images, "ratio": ratio, "experiments": experiments, "noise": noise}
        assert measure_coverage(rng, 2000, 20_000 // images, **scenario) >= 0.94, dominated


def noise_on(side: str, factor: float) -> NoiseOf:
    """Return noise that is `factor` times as large for the reference, for all experiments, or for one of them."""

    def noise(rng: np.random.Generator, runs: int) -> np.ndarray:
        shares = np.ones(runs)
        shares[{"reference": slice(1), "experiments": slice(1, None), "one experiment": slice(1, 2)}[side]] = factor
        return shares

    return noise


@pytest.mark.parametrize("side", ["reference", "experiments", "one experiment"])
@pytest.mark.parametrize(("seeds", "experiments"), each_size({(2, 5)}, [2, 3, 5, 10], [2, 3, 5, 20]))
def test_unequal_noise_on_any_side(seeds, experiments, side):
    """Check the coverage of all intervals, and the family-wise error, up to the noise of 1000 simulated studies."""
    rng = np.random.default_rng([seeds, experiments])
    scenario = {"seeds": seeds, "images": 20, "ratio": 40.0, "experiments": experiments}
    for factor, least in ((1.0, 0.94), (2.0, 0.94), (4.0, 0.90)):
        contrasts = simulate(rng, 1000, noise=noise_on(side, factor), **scenario)
        assert coverage(contrasts) >= least - 0.01, factor
        p_values = np.array([contrast.compute_p_value() for contrast in contrasts])
        # one of Holm's values is significant
        assert np.mean(len(contrasts) * p_values.min(axis=0) <= LEVEL) <= 0.05 + 0.01, factor


@pytest.mark.parametrize(("seeds", "experiments"), [(3, 5), pytest.param(2, 20, marks=pytest.mark.slow)])
def test_the_noisiest_experiments_own_interval(seeds, experiments):
    scenario = {"seeds": seeds, "images": 20, "ratio": 40.0, "experiments": experiments}
    for factor, least in ((2.0, 0.93), (4.0, 0.90), (16.0, 0.89)):
        rng = np.random.default_rng(experiments)
        noisiest = [simulate(rng, 500, noise=noise_on("one experiment", factor), **scenario)[0] for _ in range(4)]
        assert coverage(noisiest) >= least - 0.01, factor


def family_wise_error(rng, seeds: int, studies: int, images: int, ratio: float, noise: NoiseOf = equal_noise) -> float:
    contrasts = simulate(rng, studies, seeds, images, ratio, experiments=20, noise=noise)
    p_values = np.array([contrast.compute_p_value() for contrast in contrasts])
    return float(np.mean([min(apply_holm_correction(study_p_values)) <= LEVEL for study_p_values in p_values.T]))


@pytest.mark.slow  # test_unequal_noise_on_any_side measures this error, too
@pytest.mark.parametrize(("seeds", "images"), list(itertools.product([2, 3, 5, 10], [20, 100, 500])))
def test_family_wise_error_of_twenty_true_nulls(seeds, images):
    for dominated, ratio in DOMINATED.items():
        rng, batch = np.random.default_rng([seeds, images]), min(500, 50_000 // (images * seeds))
        rates = [family_wise_error(rng, seeds, batch, images, ratio) for _ in range(1 + 1000 // batch)]
        assert np.mean(rates) <= 0.05, dominated


@pytest.mark.parametrize("seeds", [2, 3])
def test_two_references_can_share_the_noise_of_a_page(seeds):
    """Compare an experiment with the baseline and with its random control, with the noise of all three."""
    rng, studies, images = np.random.default_rng(seeds), 3000, 100
    for ratio in DOMINATED.values():
        runs = rng.standard_normal((3, studies, seeds, 1)) * ratio / np.sqrt(images)
        baseline, own, control = runs + rng.standard_normal((3, studies, 1, images))

        def contrasts(*pairs: tuple[np.ndarray, np.ndarray]) -> list[PairedContrast]:
            numbers = tuple(range(seeds))
            return contrast_with_reference([PairedValues(numbers, a - b, np.ones(images)) for a, b in pairs])

        better = contrasts((own, baseline), (control, baseline))[0]
        than_random = contrasts((own, control), (baseline, control))[0]
        assert coverage([better, than_random]) >= 0.94
        p_values = np.stack([better.compute_p_value(), than_random.compute_p_value()])
        assert np.mean(2 * p_values.min(axis=0) <= LEVEL) <= 0.05  # one of Holm's two corrected values is significant


def test_pooling_shortens_the_seed_term_of_two_seeds():
    seeds, images = 2, 20
    rng = np.random.default_rng(0)
    contrasts = simulate(rng, 4000, seeds, images, DOMINATED["seeds"])
    alone = simulate(rng, 4000, seeds, images, DOMINATED["seeds"], experiments=1)
    pooled = [np.mean(stats.t.ppf(0.975, c.seed_df) * np.sqrt(c.seed_variance)) for c in contrasts]
    separate = [np.mean(stats.t.ppf(0.975, c.seed_df) * np.sqrt(c.seed_variance)) for c in alone]
    assert np.mean(pooled) <= 0.8 * np.mean(separate)


def test_larger_noise_of_one_experiment_is_found():
    *others, loud = simulate(np.random.default_rng(0), 500, 5, 50, 4.0, noise=lambda _, runs: np.array([1, 1, 1, 16]))
    assert np.mean(loud.noisy) > 0.95 and np.mean([other.noisy for other in others]) < 0.05
    assert np.median(loud.seed_df) == pytest.approx(4, abs=0.5)


def simulate_training(rng, seeds: int, images: int, ratio: float, truth: float, shared: float) -> PairedContrast:
    """Draw changes by training, in standard errors of a run's mean over images.

    Args:
        rng: the generator.
        seeds: number of seeds.
        images: number of images.
        ratio: standard deviation between seeds.
        truth: true change.
        shared: share of the images' variance that all seeds have in common.
    """
    noise = np.sqrt(1 - shared) * rng.standard_normal((500, seeds, images))
    noise += np.sqrt(shared) * rng.standard_normal((500, 1, images))
    values = truth + ratio * rng.standard_normal((500, seeds, 1)) + np.sqrt(images) * noise
    return contrast_with_base(PairedValues(tuple(range(seeds)), values, np.ones(images)))


def measure_found_losses(rng, batches: int, level: float, **scenario) -> float:
    """Return the share of studies whose p-value is at most `level`."""
    return float(
        np.mean([np.mean(simulate_training(rng, **scenario).compute_p_value() <= level) for _ in range(batches)])
    )


@pytest.mark.parametrize("seeds", [1, 3])
def test_losses_by_training_are_found_with_any_number_of_seeds(seeds):
    """One of twenty rows has a loss of ten standard errors, and Holm's method tests it at 0.25 %."""
    rng, scenario = np.random.default_rng(seeds), {"seeds": seeds, "images": 100, "shared": 1.0}
    for ratio in (0.0, 1.0):
        assert measure_found_losses(rng, 4, LEVEL / 20, truth=-10.0, ratio=ratio, **scenario) >= 0.95
        assert measure_found_losses(rng, 4, LEVEL, truth=0.0, ratio=ratio, **scenario) <= 0.06, "noise of 2000 studies"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.5, 1.0])
@pytest.mark.parametrize("images", [50, 500])
@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
def test_losses_by_training_at_all_sizes(seeds, images, shared):
    rng, scenario = np.random.default_rng([seeds, images]), {"seeds": seeds, "images": images, "shared": shared}
    for ratio in (0.0, 0.5, 1.0):
        for rows in (1, 10, 20):
            assert measure_found_losses(rng, 10, LEVEL / rows, truth=-10.0, ratio=ratio, **scenario) >= 0.95
        assert measure_found_losses(rng, 40, LEVEL, truth=0.0, ratio=ratio, **scenario) <= 0.055, "noise of 20000"


def test_seeds_that_vary_more_than_images_have_their_own_noise():
    values = np.random.default_rng(0).normal(size=(5, 1, 400)) + 5 * np.random.default_rng(1).normal(size=(5, 1, 1))
    contrast = contrast_with_base(paired(values[:, 0]))
    assert contrast.noisy and contrast.seed_df == 4
    assert contrast.seed_variance == pytest.approx(values.mean(axis=-1).var(ddof=1) / 5)


def paired(values, seeds=None, counts=None) -> PairedValues:
    """Return differences (S, U)."""
    values = np.asarray(values, dtype=float)
    counts = np.ones(values.shape[1]) if counts is None else np.asarray(counts, dtype=float)
    return PairedValues(tuple(seeds or range(len(values))), values, counts)


def contrast_alone(values, **keys) -> PairedContrast:
    [contrast] = contrast_with_reference([paired(values, **keys)])
    return contrast


def test_one_seed_is_students_paired_test_over_images():
    values = np.random.default_rng(1).normal(0.3, 1, size=(1, 40))
    contrast, expected = contrast_alone(values), stats.ttest_1samp(values[0], 0)
    interval = expected.confidence_interval(0.95)
    assert contrast.compute_p_value() == pytest.approx(expected.pvalue, rel=1e-6)
    assert [
        contrast.mean - contrast.compute_half_width(),
        contrast.mean + contrast.compute_half_width(),
    ] == pytest.approx(list(interval))


def test_two_experiments_use_their_own_differences_noise():
    values = np.random.default_rng(2).normal(size=(3, 30))
    contrast = contrast_alone(values)
    assert contrast.seed_variance == pytest.approx(values.mean(axis=1).var(ddof=1) / 3)
    assert contrast.seed_df == 2


def test_pooled_noise_equals_a_two_way_analysis_of_variance():
    """Compare with the textbook formula of the residual mean square of the differences."""
    differences = np.random.default_rng(5).normal(size=(4, 4))
    for reference_noise in (0.0, 10.0):
        runs = differences + reference_noise * np.array([1, 0, 0, -1])
        centered = runs - runs.mean(axis=0) - runs.mean(axis=1, keepdims=True) + runs.mean()
        residual = (centered**2).sum() / (3 * 3)
        expected = max(2 * residual, runs.var(axis=1, ddof=1).mean())
        contrasts = contrast_with_reference([paired(np.repeat(own[:, None], 6, axis=1)) for own in runs])
        quiet = [contrast for contrast in contrasts if not contrast.noisy]
        assert quiet and all(contrast.seed_variance * 4 == pytest.approx(expected) for contrast in quiet)
        parts = expected - 0.75 * residual, 0.75 * residual
        expected_df = expected**2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 9)
        assert all(contrast.seed_df == pytest.approx(expected_df) for contrast in quiet)
    assert expected_df == pytest.approx(3, abs=0.2), "the reference's noise has the degrees of freedom of its seeds"


def test_experiments_with_as_many_seeds_share_the_noise():
    values = np.random.default_rng(3).normal(size=(3, 6, 20))
    few, many = paired(values[0][:2], seeds=(0, 1)), paired(values[1], seeds=range(6))
    assert contrast_with_reference([few, many]) == [contrast_with_reference([values])[0] for values in (few, many)]
    apart = contrast_with_reference([many, paired(values[2], seeds=range(6, 12))])  # they share no run of the reference
    assert apart[0].seed_df > 5 and all(np.isfinite(contrast.compute_half_width()) for contrast in apart)


@pytest.mark.parametrize("noise", [1.0, pytest.param(2.0, marks=pytest.mark.slow), 4.0])
@pytest.mark.parametrize("others", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_an_experiment_with_fewer_seeds_than_the_others(others, noise):
    rng, counts, studies = np.random.default_rng(others), np.ones(3), 3000
    reference = rng.normal(size=(studies, others, 1))
    seeds, factors = [2, *[others] * 4], [noise, 1, 1, 1, 1]
    contrasts = contrast_with_reference(
        [
            PairedValues(
                tuple(range(number)),
                factor * rng.normal(size=(studies, number, 1)) - reference[:, :number] + np.zeros(3),
                counts,
            )
            for number, factor in zip(seeds, factors, strict=True)
        ]
    )
    assert coverage(contrasts[:1]) >= 0.93 and coverage(contrasts) >= 0.94
    p_values = np.array([contrast.compute_p_value() for contrast in contrasts])
    assert np.mean(len(contrasts) * p_values.min(axis=0) <= LEVEL) <= 0.05


def test_equal_results_do_not_count_in_the_noise_estimate():
    values = np.random.default_rng(4).normal(size=(3, 20))
    alone, same, repeated = contrast_with_reference([paired(values), paired(0 * values), paired(values)])
    assert alone == repeated == contrast_alone(values)
    assert (same.mean, same.compute_half_width(), same.compute_p_value()) == (0, 0, 1)


def test_experiment_with_one_seed_has_no_seed_term():
    rng = np.random.default_rng(6)
    single, *others = contrast_with_reference([paired(rng.normal(size=(seeds, 20))) for seeds in (1, 3, 3)])
    assert single.seed_variance == 0 and others[0].seed_df > 2


def test_interval_at_the_p_values_level_ends_at_zero():
    rng = np.random.default_rng(7)
    for contrast in contrast_with_reference([paired(rng.normal(0.2, 1, size=(3, 20))) for _ in range(3)]):
        assert contrast.compute_half_width(float(contrast.compute_p_value())) == pytest.approx(abs(contrast.mean))
        assert contrast.compute_half_width(float(contrast.compute_p_value(0.5))) == pytest.approx(
            abs(contrast.mean - 0.5)
        )


def test_extreme_p_values():
    assert contrast_alone(np.full((1, 5), 0.1)).compute_p_value() == 2**-4  # p-value of the sign test
    assert 0 < contrast_alone([[1.0, 1.0, 1.0, 1.0 + 1e-9]]).compute_p_value() < 1e-20


def test_holms_procedure_on_a_worked_example():
    assert apply_holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert apply_holm_correction([]) == []


def make_contrast(mean: float, error: float = 0.01, images: int = 400, seeds: int = 1) -> PairedContrast:
    zero = np.zeros(())
    seed_variance = zero + (0 if seeds == 1 else error**2)
    return PairedContrast(zero + mean, images, images, seeds, zero + error**2, images - 1, seed_variance,
                    zero + (np.inf if seeds == 1 else seeds - 1), zero > 0)  # fmt: skip


@pytest.mark.parametrize(
    ("mean", "error", "kind"),
    [
        (0.05, 0.01, "better"),
        (-0.05, 0.01, "worse"),
        (0.001, 0.002, "equivalent"),
        (0.005, 0.001, "equivalent"),  # negligible, although it is not zero
        (0.01, 0.01, "undecided"),
    ],
)
def test_verdict_of_one_experiment(mean, error, kind):
    [decision] = decide([make_contrast(mean, error)], margin=0.01)
    [reverse] = decide([make_contrast(mean, error)], margin=0.01, lower_is_better=True)
    assert decision.kind == kind
    assert reverse.kind == {"better": "worse", "worse": "better"}.get(kind, kind)


def test_verdict_is_corrected_for_the_number_of_experiments():
    alone, several = [make_contrast(0.022)], [make_contrast(0.022), *[make_contrast(0.0)] * 3]
    assert decide(alone, 0.01)[0].kind == "better" and decide(several, 0.01)[0].kind == "undecided"
    assert decide(several, 0.01)[0].p_value == pytest.approx(4 * decide(alone, 0.01)[0].p_value)


def test_a_wide_interval_is_not_equivalent():
    assert decide([make_contrast(0.0, 0.006)], margin=0.01)[0].kind == "undecided"
    assert decide([make_contrast(0.0, 0.004)], margin=0.01)[0].kind == "equivalent"
    assert decide([make_contrast(0.0, 0.004)], margin=0)[0].kind == "undecided"


def test_one_image_gives_no_decision():
    [decision] = decide(contrast_with_reference([paired([[3.0], [3.1]])]), margin=0.01)
    assert decision == decide([make_contrast(1.0, images=1)], 0.01)[0]
    assert (decision.kind, decision.detectable, decision.cost.seeds, decision.cost.images) == (
        "undecided",
        None,
        None,
        None,
    )


@pytest.mark.parametrize(("seeds", "experiments"), [(2, 3), (5, 1)])
def test_detectable_difference_is_shown_in_four_of_five(seeds, experiments):
    scenario = {"seeds": seeds, "images": 100, "experiments": experiments}
    for dominated, ratio in DOMINATED.items():
        rng = np.random.default_rng(8)
        estimates = simulate(rng, 1000, ratio=ratio, **scenario)[0]
        variances = [float(np.mean(part)) for part in (estimates.image_variance, estimates.seed_variance)]
        seed_df = 1 / float(np.mean(1 / estimates.seed_df))
        typical = PairedContrast(
            0.0, 100, 100, seeds, variances[0], 99, variances[1], seed_df, np.zeros((), dtype=bool)
        )
        truth = typical.compute_detectable()
        contrasts = simulate(rng, 1000, ratio=ratio, truth=truth, **scenario)[0]
        power = np.mean((contrasts.compute_p_value() <= LEVEL) & (contrasts.mean > 0))
        assert power == pytest.approx(0.8, abs=0.08), dominated


@pytest.mark.parametrize(
    ("seeds", "images"),
    [(2, 20), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 20), (2, 400), (10, 20)))],
)
def test_the_stated_detectable_difference_is_not_too_small(seeds, images):
    """Draw both variances: half of the statements exceed the truth, and four of five intervals contain it."""
    truth, rng = make_contrast(0.0, images=images, seeds=seeds), np.random.default_rng(seeds)
    drawn = [
        replace(
            truth,
            image_variance=truth.image_variance * rng.chisquare(images - 1) / (images - 1),
            seed_variance=truth.seed_variance * (rng.chisquare(seeds - 1) / (seeds - 1) if seeds > 1 else 0),
        )
        for _ in range(300)
    ]
    estimates = np.array([contrast.estimate_detectable() for contrast in drawn])
    expected = truth.compute_detectable()
    assert np.mean(estimates[:, 0] >= expected) == pytest.approx(0.5, abs=0.08)
    assert np.mean((estimates[:, 1] <= expected) & (expected <= estimates[:, 2])) == pytest.approx(0.8, abs=0.06)


def test_cost_in_images_equals_the_textbook_formula():
    """Compare with (z + z)² σ² / d², the images that show d with 80 % power, for one seed and many images."""
    [decision] = decide([make_contrast(0.01, 0.01, images=400)], margin=0)
    total = (stats.norm.isf(VERDICT_LEVEL / 2) + 0.84162) ** 2 * (0.01**2 * 400) / 0.01**2
    assert decision.cost.images == pytest.approx(total - 400, rel=0.01)
    assert decision.cost.seeds is None


def test_the_cost_in_seeds_is_sufficient_for_a_decision():
    contrast = make_contrast(0.02, 0.005, seeds=3)
    [decision] = decide([draw_median(contrast)], margin=0.001)
    assert decision.kind == "undecided" and decision.cost.seeds
    total = 3 + decision.cost.seeds
    detectable = [contrast.with_seeds(seeds).compute_detectable(VERDICT_LEVEL) for seeds in (total, total - 1)]
    assert detectable[0] <= 0.02 < detectable[1]


def test_no_cost_if_neither_seeds_nor_images_suffice():
    [decision] = decide([draw_median(make_contrast(0.02, 0.01, seeds=2))], margin=0)
    assert decision.cost.images is None  # training noise alone hides it
    [decision] = decide([draw_median(make_contrast(0.001, 0.01, seeds=2))], margin=0)
    assert decision.cost.seeds is None  # the choice of images alone hides it
    [decision] = decide([draw_median(make_contrast(0.005, 0.01, seeds=2))], margin=0)
    seeds, images = decision.cost.both
    both = make_contrast(0.005, 0.01, seeds=2).with_images(400 + images).with_seeds(2 + seeds)
    assert both.compute_detectable() <= 0.005


def true_contrast(seeds: int, images: int, ratio: float, truth: float) -> PairedContrast:
    """Return the contrast of one experiment with the true variances of `simulate`."""
    zero = np.zeros(())
    single = 2 * 0.3**2 / seeds  # noise of single scores, which both terms contain
    return PairedContrast(zero + truth, images, images, seeds, zero + (2 + single) / images, images - 1,
                    zero + 2 * ratio**2 / images / seeds + single / images, zero + seeds - 1, zero > 0)  # fmt: skip


def share_decided(seeds: int, images: int, ratio: float, truth: float, margin: float) -> float:
    rng, kinds = np.random.default_rng([seeds, images]), []
    for _ in range(4):
        [contrast] = simulate(rng, 500, seeds, images, ratio, experiments=1, truth=truth)
        half_width, mean = contrast.compute_half_width(), contrast.mean
        kinds += [(np.abs(mean) + half_width <= margin) | (mean - half_width > 0)]  # the sign is correct
    return float(np.mean(kinds))


@pytest.mark.parametrize(
    ("seeds", "ratio", "truth", "margin"),
    [(3, 4.0, 0.9, 0.0), (5, 2.0, 0.1, 0.5)],
    ids=["difference", "equivalence"],
)
def test_the_cost_in_seeds_decides_four_of_five_studies(seeds, ratio, truth, margin):
    """Draw studies with the difference and noise that the cost assumes, before and after the seeds are added."""
    images = 100
    [verdict] = decide([draw_median(true_contrast(seeds, images, ratio, truth))], margin)
    assert verdict.kind == "undecided"
    shown = [share_decided(verdict.cost.seeds + more, images, ratio, truth, margin) for more in (seeds - 1, seeds)]
    assert shown[0] < 0.82 and 0.78 < shown[1] < 0.89  # one seed may add 9 points


@pytest.mark.parametrize(
    ("ratio", "truth", "margin"),
    [(1.0, 0.4, 0.0), (1.0, 0.0, 0.45)],
    ids=["difference", "equivalence at zero"],
)
def test_the_cost_in_images_decides_four_of_five_studies(ratio, truth, margin):
    seeds, images = 5, 50
    [verdict] = decide([draw_median(true_contrast(seeds, images, ratio, truth))], margin)
    total = images + verdict.cost.images
    same_noise = ratio * np.sqrt(total / images)  # the noise of seeds does not change
    shown = share_decided(seeds, total, same_noise, truth, margin)
    assert shown == pytest.approx(0.8, abs=0.07)


def test_cost_of_equivalence_equals_the_textbook_formula():
    """Both ends must lie within the margin: in 77.5 % of studies, and 2.5 % show a difference instead."""
    [near], [margin] = decide([make_contrast(0.0, 0.02)], margin=0.02), decide([make_contrast(0.02, 0.02)], margin=0)
    quantiles = stats.norm.isf([0.025, (1 - 0.775) / 2, VERDICT_LEVEL / 2, 0.2])
    expected = ((quantiles[0] + quantiles[1]) / (quantiles[2] + quantiles[3])) ** 2
    assert (400 + near.cost.images) / (400 + margin.cost.images) == pytest.approx(expected, rel=0.01)


def test_equivalence_costs_little_more_with_two_experiments():
    """Holm's method halves a level of 4.5 % on one side, and the interval of 95 % has 2.5 % already."""
    alone, pair = [make_contrast(0.0, 0.02)], [make_contrast(0.0, 0.02)] * 2
    assert decide(alone, 0.02)[0].cost.images == pytest.approx(decide(pair, 0.02)[0].cost.images, rel=0.07)


@pytest.mark.parametrize(("images", "kind"), [(5, "undecided"), (6, "better")])
def test_equal_differences_have_the_sign_tests_p_value(images, kind):
    """The sign test's two-sided p-value is 6 % for five of five better images, and 3 % for six of six."""
    [contrast] = contrast_with_reference([PairedValues((0, 1), np.full((2, images), 0.1), np.ones(images))])
    [verdict] = decide([contrast], margin=0.01)
    assert verdict.p_value == pytest.approx(stats.binomtest(images, images).pvalue)
    assert verdict.kind == compute_verdict(contrast, LEVEL, 0.01) == kind
    assert set(verdict.detectable) == {np.inf if kind == "undecided" else 0}
    assert (verdict.cost.seeds, verdict.cost.images) == (None, 1 if kind == "undecided" else None)
