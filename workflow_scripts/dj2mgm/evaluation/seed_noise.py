"""Estimate of the noise between seeds, pooled over all experiments of a page that have several seeds.

The seed term of a difference has only S − 1 degrees of freedom for S seeds. If the experiments of a page vary equally
between seeds, their seed noise is estimated together. In the model y = experiment + seed + noise for the mean y of each
run, the residuals of E experiments and the reference have E (S − 1) degrees of freedom, and a difference has twice
their variance. `estimate_seed_noise` takes this variance or, if it is larger, the mean of the E variances of
differences. This second estimate stays right if the reference varies more than the experiments.

If the noise of an experiment is larger than the noise of the others, its pooled interval is too short. An F test
compares each experiment's residuals with the residuals of all others, with Bonferroni's correction (Cochran's test in
the form of 't Lam 2010, Analytica Chimica Acta 659, 68). Bartlett's test also reacts to small variances, for which
pooling is conservative, and fails for equal scores. Levene's test is undefined for two seeds, whose deviations from
their mean are equal. An experiment with larger noise gets the longer of its own interval and the pooled interval. If
the reference has larger noise, this applies to all experiments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import fdtrc

from dj2mgm.evaluation.intervals import compute_student_quantile
from dj2mgm.evaluation.paired_values import PairedValues

# Level of the test for larger seed noise. At 0.05, false alarms lengthen intervals of two seeds by 10 %.
POOLING_LEVEL = 0.02


def estimate_seed_noise(experiments: Sequence[PairedValues]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the variance of one seed's difference, its degrees of freedom, and whether the experiment is noisy.

    Experiments with one seed have no noise and infinite degrees of freedom. Equal results count once, and results that
    equal the reference's do not count, since stages are shared.
    """
    zero = np.zeros(experiments[0].sums.shape[:-2]) if experiments else np.zeros(())
    own_variances = [
        np.var(experiment.means, axis=-1, ddof=1) if len(experiment.seeds) > 1 else zero for experiment in experiments
    ]
    pool = _select_distinct([experiment for experiment in experiments if len(experiment.seeds) > 1])
    pooled = _pool_noise(pool) if len(pool) > 1 else None
    noise = []
    for values, own_variance in zip(experiments, own_variances, strict=True):
        own_df = len(values.seeds) - 1
        index = next((number for number, experiment in enumerate(pool) if _are_equal(experiment, values)), None)
        if not own_df:
            noise.append((zero, zero + np.inf, zero > 0))
        elif pooled is None or index is None:
            noise.append((own_variance, zero + own_df, zero > 0))
        else:
            own_square = compute_student_quantile(own_df) ** 2 * own_variance  # of half the interval's length
            is_noisy = own_square > compute_student_quantile(pooled.degrees_of_freedom) ** 2 * pooled.variance
            is_noisy &= pooled.noisy[index] | pooled.noisy_reference
            larger_variance = np.where(is_noisy, own_variance, pooled.variance)
            noise.append((larger_variance, np.where(is_noisy, own_df, pooled.degrees_of_freedom), is_noisy))
    return noise


def _select_distinct(experiments: list[PairedValues]) -> list[PairedValues]:
    """Return the experiments whose results differ from the reference's and from each other's."""
    distinct: list[PairedValues] = []
    for experiment in experiments:
        if np.any(experiment.sums) and not any(_are_equal(experiment, other) for other in distinct):
            distinct.append(experiment)
    return distinct


def _are_equal(values: PairedValues, other_values: PairedValues) -> bool:
    return values is other_values or (
        values.seeds == other_values.seeds and np.array_equal(values.sums, other_values.sums)
    )


@dataclass(frozen=True)
class _PooledNoise:
    """Noise between seeds that several experiments share, as arrays with the shape of the contrasts.

    Attributes:
        variance: variance of a difference.
        degrees_of_freedom: degrees of freedom of the variance.
        noisy_reference: whether the reference is noisier than the experiments.
        noisy: whether each experiment is noisier than the others.
    """

    variance: np.ndarray
    degrees_of_freedom: int
    noisy_reference: np.ndarray
    noisy: list[np.ndarray]


def _pool_noise(experiments: list[PairedValues]) -> _PooledNoise:
    """Pool the seed noise of several experiments."""
    seeds = sorted({seed for experiment in experiments for seed in experiment.seeds})
    rows = [(0, seed) for seed in seeds]  # the reference, whose difference is zero
    rows += [(number, seed) for number, experiment in enumerate(experiments, start=1) for seed in experiment.seeds]
    leading_shape = experiments[0].sums.shape[:-2]
    values = np.concatenate(
        [np.zeros((*leading_shape, len(seeds))), *(experiment.means for experiment in experiments)], axis=-1
    )
    squares, degrees_of_freedom = _sum_residual_squares(rows, values)
    sums_of_squares = [
        experiment.means.var(axis=-1, ddof=1) * (len(experiment.seeds) - 1) for experiment in experiments
    ]
    mean_variance = sum(sums_of_squares) / sum(len(experiment.seeds) - 1 for experiment in experiments)
    variance = np.maximum(2 * squares / degrees_of_freedom, mean_variance)
    noisy = []
    for number in range(len(experiments) + 1):
        indices = [index for index, (row, _) in enumerate(rows) if row != number]
        other_squares, other_df = _sum_residual_squares([rows[index] for index in indices], values[..., indices])
        if other_df < 1:
            noisy.append(np.zeros(leading_shape, dtype=bool))
            continue
        own_df = degrees_of_freedom - other_df
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = ((squares - other_squares) / own_df) / (other_squares / other_df)
        p = fdtrc(own_df, other_df, np.nan_to_num(ratio)) * (len(experiments) + 1)
        noisy.append(p < POOLING_LEVEL)
    return _PooledNoise(variance, degrees_of_freedom, noisy[0], noisy[1:])


def _sum_residual_squares(rows: list[tuple[int, int]], values: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the squared residuals' sum of the least-squares fit by experiment and seed, and its degrees of freedom.

    Args:
        rows: (N,) experiment and seed of each value.
        values: (…, N)
    """
    columns = [[row[part] == key for row in rows] for part in (0, 1) for key in sorted({row[part] for row in rows})]
    design = np.array(columns, dtype=float).T
    fit = design @ np.linalg.pinv(design)
    residuals = values - values @ fit.T
    return (residuals**2).sum(axis=-1), len(rows) - int(np.linalg.matrix_rank(design))
