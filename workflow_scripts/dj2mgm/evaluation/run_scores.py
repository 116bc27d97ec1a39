"""Scores of runs by image, means of an experiment over its seeds, and paired differences between two experiments.

Differences are paired by seed and image, so that an image's difficulty cancels. evaluation/intervals.py explains the
intervals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from dj2mgm.errors import InputError
from dj2mgm.evaluation.contrasts import PairedContrast, PairedValues, contrast_with_reference
from dj2mgm.evaluation.groups import estimate_metric, find_score_range, format_group_name
from dj2mgm.evaluation.intervals import LEVEL, Estimate
from dj2mgm.score_groups import DIFFERENCE, OWN, SHUFFLED, name_group, split_group
from dj2mgm.storage.files import read_jsonl

GroupEstimates = dict[str, dict[str, Estimate]]  # by group and metric


@dataclass(frozen=True)
class MetricValues:
    """One metric of one run on U images; its mean over values is sums.sum() / counts.sum()."""

    ids: np.ndarray  # (U,) str, sorted
    sums: np.ndarray  # (U,) float64, sum of each image's values
    counts: np.ndarray  # (U,) float64, number of each image's values
    file: Path  # source of the values, for messages

    def __sub__(self, other: "MetricValues") -> "MetricValues":
        """Return the difference on the images of both sides."""
        ids, own_indices, other_indices = np.intersect1d(self.ids, other.ids, assume_unique=True, return_indices=True)
        counts = self.counts[own_indices]
        if len(unequal := np.flatnonzero(counts != other.counts[other_indices])):
            raise InputError(
                f"image {ids[unequal[0]]} has {counts[unequal[0]]:g} values in {self.file} and "
                f"{other.counts[other_indices][unequal[0]]:g} in {other.file}; compare runs on the same evaluation data"
            )
        return MetricValues(ids, self.sums[own_indices] - other.sums[other_indices], counts, self.file)

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())


@dataclass(frozen=True)
class RunScores:
    """Values of all metrics of one run by group and metric; `<model>/difference` is own − shuffled images."""

    experiment: str
    seed: int
    groups: dict[str, dict[str, MetricValues]]

    @property
    def run(self) -> str:
        return f"{self.experiment} with seed {self.seed}"


def read_run_scores(experiment: str, seed: int, *paths: str | Path) -> RunScores:
    """Read a run's scores.jsonl of one or more evaluations, whose rows `groups.iterate_score_rows` defines."""
    rows_by_metric: dict[str, dict[str, tuple[Path, list[tuple[str, float, float]]]]] = {}
    for path in map(Path, paths):
        for row in read_jsonl(path):
            metrics = rows_by_metric.setdefault(format_group_name(row), {})
            for metric, (total, count) in row["values"].items():
                metrics.setdefault(metric, (path, []))[1].append((row["id"], total, count))
    groups: dict[str, dict[str, MetricValues]] = {}
    for group, metrics in rows_by_metric.items():
        groups[group] = {metric: _build_per_image(path, metric, rows) for metric, (path, rows) in metrics.items()}
        model, images = split_group(group)
        if images == SHUFFLED and (own_metrics := groups.get(name_group(model, OWN))):
            shuffled_metrics = groups[group]
            groups[name_group(model, DIFFERENCE)] = {
                name: own_metrics[name] - shuffled_metrics[name] for name in own_metrics if name in shuffled_metrics
            }
    return RunScores(experiment, seed, groups)


def _build_per_image(path: Path, metric: str, rows: list[tuple[str, float, float]]) -> MetricValues:
    if unknown := [name for name, total, _ in rows if not isfinite(total)]:
        raise InputError(
            f"{path}: {metric} of image {unknown[0]} is not a finite number; delete the file and evaluate again"
        )
    ids, sums, counts = zip(*sorted(rows), strict=True)
    return MetricValues(np.array(ids), np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64), path)


def drop_images(run: RunScores, ids: set[str]) -> RunScores:
    """Return the run's values without some images, and without metrics that then have no values."""
    groups: dict[str, dict[str, MetricValues]] = {}
    for group, metrics in run.groups.items():
        for metric, values in metrics.items():
            mask = ~np.isin(values.ids, list(ids))
            if mask.any():
                other_values = MetricValues(values.ids[mask], values.sums[mask], values.counts[mask], values.file)
                groups.setdefault(group, {})[metric] = other_values
    return RunScores(run.experiment, run.seed, groups)


def select_metrics(run: RunScores, names: set[str]) -> RunScores:
    """Return the run's values of some metrics."""
    groups = {
        group: {name: values for name, values in metrics.items() if name in names}
        for group, metrics in run.groups.items()
    }
    return RunScores(run.experiment, run.seed, groups)


def aggregate(runs: list[RunScores]) -> GroupEstimates:
    """Return the mean over seeds of each seed's mean over values, with its 95 % interval, by group and metric.

    Raises:
        InputError: the runs differ in their metrics or images.
    """
    _check_same_images(runs)
    estimates: GroupEstimates = {}
    for group, metric in _list_keys(runs[0]):
        seeds = [run.groups[group][metric] for run in runs]
        sums, paired = np.stack([seed.sums for seed in seeds]), split_group(group)[1] == DIFFERENCE
        estimates.setdefault(group, {})[metric] = estimate_metric(metric, sums, seeds[0].counts, paired)
    return estimates


def estimate_paired_difference(runs: list[RunScores], reference_runs: list[RunScores]) -> GroupEstimates:
    """Return the estimates of `pair_values` for two experiments, each with its own seed noise."""
    return estimate_differences([pair_values(runs, reference_runs)])[0]


def estimate_differences(experiments: list[dict[tuple[str, str], PairedValues]]) -> list[GroupEstimates]:
    """Estimate the differences of a page's experiments from its reference, with the seed noise of all of them."""
    estimates: list[GroupEstimates] = [{} for _ in experiments]
    for group, metric in dict.fromkeys(key for values in experiments for key in values):
        measured = [number for number, values in enumerate(experiments) if (group, metric) in values]
        contrasts = contrast_with_reference([experiments[number][group, metric] for number in measured])
        for number, contrast in zip(measured, contrasts, strict=True):
            estimates[number].setdefault(group, {})[metric] = estimate_difference(contrast, group, metric)
    return estimates


def estimate_difference(contrast: PairedContrast, group: str, metric: str, level: float = LEVEL) -> Estimate:
    """Return the mean of a difference with its interval at `level`, within the range of the metric's differences."""
    low, high = find_score_range(metric)
    largest = (high - low) * (2 if split_group(group)[1] == DIFFERENCE else 1)
    mean, half_width = float(contrast.mean), float(contrast.compute_half_width(level))
    ends = (None, None) if contrast.images == 1 else (mean - half_width, mean + half_width)
    return Estimate(contrast.values, contrast.images, contrast.seeds, mean, *ends).clip_interval(-largest, largest)


def pair_values(runs: list[RunScores], reference_runs: list[RunScores]) -> dict[tuple[str, str], PairedValues]:
    """Return own − reference, paired by seed and image, on common seeds, groups, metrics and images.

    Ids name images of one dataset; reporting/comparison.py checks that both were measured in the same way. The result
    is empty without a common metric.

    Raises:
        InputError: there is no common seed or image, or an experiment's runs differ in their images.
    """
    _check_same_images(runs)
    _check_same_images(reference_runs)
    reference_keys = set(_list_keys(reference_runs[0]))
    shared_keys = [key for key in _list_keys(runs[0]) if key in reference_keys]
    if not shared_keys:
        return {}
    pairs = pair_runs_by_seed(runs, reference_runs)
    differences = {
        (group, metric): [
            run.groups[group][metric] - reference_run.groups[group][metric] for run, reference_run in pairs
        ]
        for group, metric in shared_keys
    }
    differences = {key: values for key, values in differences.items() if len(values[0].ids)}
    if not differences:
        names = f"{runs[0].experiment} and {reference_runs[0].experiment}"
        raise InputError(f"{names} have no common evaluation image; compare experiments on the same dataset")
    seeds = tuple(run.seed for run, _ in pairs)
    return {
        key: PairedValues(seeds, np.stack([seed.sums for seed in values]), values[0].counts)
        for key, values in differences.items()
    }


def pair_runs_by_seed(runs: list[RunScores], reference_runs: list[RunScores]) -> list[tuple[RunScores, RunScores]]:
    """Pair each run with the reference run of its seed; raise InputError if they share no seed."""
    by_seed = {run.seed: run for run in reference_runs}
    if pairs := [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]:
        return pairs
    names = f"{runs[0].experiment} and {reference_runs[0].experiment}"
    own_seeds, reference_seeds = ([run.seed for run in side] for side in (runs, reference_runs))
    raise InputError(
        f"{names} have no common seed ({own_seeds} and {reference_seeds}); run both with at least one equal seed"
    )


def _list_keys(run: RunScores) -> Iterator[tuple[str, str]]:
    return ((group, metric) for group, metrics in run.groups.items() for metric in metrics)


def _check_same_images(runs: list[RunScores]) -> None:
    """Raise InputError unless all runs have the same metrics, measured on the same images."""
    first_run, *other_runs = runs
    for other_run in other_runs:
        if unshared := set(_list_keys(first_run)) ^ set(_list_keys(other_run)):
            group, metric = min(unshared)
            has, lacks = (first_run, other_run) if metric in first_run.groups.get(group, {}) else (other_run, first_run)
            raise InputError(
                f"{has.run} has {metric} of {group} ({has.groups[group][metric].file}), but {lacks.run} does not; run "
                "both evaluations again"
            )
        for group, metric in _list_keys(first_run):
            first_values, other_values = first_run.groups[group][metric], other_run.groups[group][metric]
            if not np.array_equal(first_values.ids, other_values.ids) or not np.array_equal(
                first_values.counts, other_values.counts
            ):
                raise InputError(
                    f"{other_run.run}: {metric} of {group} in {other_values.file} has other images than in "
                    f"{first_run.run} ({len(other_values.ids)} and {len(first_values.ids)}); generate its answers "
                    "again from the same evaluation split"
                )
