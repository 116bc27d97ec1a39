"""Estimate of the noise between seeds, pooled over experiments of a page with the same number of seeds.

The difference of an experiment from the reference varies between S seeds by the noise of the experiment, σ_e², and that
of the reference, σ_r². In the model d = experiment + seed + noise for the mean difference d of each run, the residuals
of E experiments estimate σ_e² with (E − 1)(S − 1) degrees of freedom. All differences share the reference's noise, so
that σ_r² has only S − 1, however many experiments there are. The pooled variance of a difference is

    V = max(mean variance of the differences, 2 B) = A + (1 − 1/E) B

B is the residual mean square, and A the rest, the noise of the seeds' means over experiments. With 2 B as a lower
bound, the reference is at least as noisy as the experiments. If the variance v of an experiment's own differences is
larger than V, it replaces V. It is then the sum of V', the pooled variance of the other experiments, and the excess
over it. Both sums have the degrees of freedom of a sum of independent variances (Satterthwaite 1946, Biometrics
Bulletin 2, 110):

    ν = V² / (A² / (S − 1) + ((1 − 1/E) B)² / ((E − 1)(S − 1)))      v² / (V'² / ν' + (v − V')² / (S − 1))

If the reference or the experiment dominates, they approach S − 1. Only experiments with the same number of seeds are
pooled. Others may have precise estimates of a smaller noise, which hide that an experiment with two seeds is noisier.
"""

from collections.abc import Sequence

import numpy as np

from dj2mgm.evaluation.paired_values import PairedValues


def estimate_seed_noise(experiments: Sequence[PairedValues]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the variance of one seed's difference, its degrees of freedom, and whether the experiment is noisy.

    An experiment is noisy if its own variance is larger than the pooled one. Experiments with one seed have no noise
    and infinite degrees of freedom. Equal results count once, and results that equal the reference's do not count,
    since stages are shared.
    """
    zero = np.zeros(experiments[0].sums.shape[:-2]) if experiments else np.zeros(())
    distinct = _select_distinct([experiment for experiment in experiments if len(experiment.seeds) > 1])
    noise = []
    for values in experiments:
        own_df = len(values.seeds) - 1
        own_variance = np.var(values.means, axis=-1, ddof=1) if own_df else zero
        pool = [experiment for experiment in distinct if len(experiment.seeds) == len(values.seeds)]
        others = [experiment for experiment in pool if not _are_equal(experiment, values)]
        if not own_df:
            noise.append((zero, zero + np.inf, zero > 0))
        elif len(pool) < 2 or len(others) == len(pool):
            noise.append((own_variance, zero + own_df, zero > 0))
        else:
            (variance, pooled_df), (other_variance, other_df) = _pool_noise(pool), _pool_noise(others)
            explained = np.minimum(own_variance, other_variance)
            df = _combine_degrees_of_freedom((explained, other_df), (own_variance - explained, own_df))
            noisy = own_variance > variance
            noise.append((np.maximum(own_variance, variance), np.where(noisy, df, pooled_df), noisy))
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


def _pool_noise(experiments: list[PairedValues]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pooled variance of a difference, and its degrees of freedom, in the shape of the contrasts."""
    rows = [(number, seed) for number, experiment in enumerate(experiments) for seed in experiment.seeds]
    values = np.concatenate([experiment.means for experiment in experiments], axis=-1)
    squares, residual_df = _sum_residual_squares(rows, values)
    residual_variance = squares / residual_df if residual_df else 0 * squares  # no two experiments share two seeds
    own_dfs = [len(experiment.seeds) - 1 for experiment in experiments]
    own_squares = [
        experiment.means.var(axis=-1, ddof=1) * own_df for experiment, own_df in zip(experiments, own_dfs, strict=True)
    ]
    variance = np.maximum(sum(own_squares) / sum(own_dfs), 2 * residual_variance)
    own_part = (1 - 1 / len(experiments)) * residual_variance
    df = _combine_degrees_of_freedom((variance - own_part, np.mean(own_dfs)), (own_part, max(1, residual_df)))
    return variance, df


def _combine_degrees_of_freedom(*parts: tuple[np.ndarray, np.ndarray | float]) -> np.ndarray:
    """Return Satterthwaite's degrees of freedom of a sum of independent variances, given with their own.

    A sum of zero has those of the last part.
    """
    total = sum(variance for variance, _ in parts)
    shares = [variance / np.where(total > 0, total, 1.0) for variance, _ in parts]
    shares[-1] = np.where(total > 0, shares[-1], 1.0)
    return 1 / sum(share**2 / df for share, (_, df) in zip(shares, parts, strict=True))


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
