"""What an experiment is worth over all its seeds, and by how much two experiments differ.

A measured mean is uncertain for two reasons: other images would have been easier or harder, and training again with
another seed gives another model. More images lessen only the first, more seeds mainly the second, so the interval holds
both:

    variance = V_images + s² / S

V_images is the bootstrap variance of the mean over S seeds, images resampled jointly for all seeds because all seeds
answer the same ones; s² is the variance between the seeds' means. s² comes from only S − 1 degrees of freedom, so the
interval is Student's, with the Welch–Satterthwaite degrees of freedom of the sum (Satterthwaite 1946; V_images rests on
so many images that its term vanishes). With two or three seeds that makes it wide, and it should be: two numbers say
little about how much a third would differ. Where seeds disagree about single images, that noise is in both terms, which
errs on the wide side. With one seed nothing is known about training noise, and the interval is the percentile bootstrap
over images alone.

Differences are paired by seed and image: what makes an image hard for both experiments cancels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import InputError
from evaluation.bootstrap import bootstrap_means
from evaluation.groups import group_of
from files import read_jsonl

BOOTSTRAP_SAMPLES = 2000
BOOTSTRAP_SEED = 0
CONFIDENCE = 0.95

Estimate = dict[str, float]  # n: values per seed, mean, low, high, seeds: their number
Estimates = dict[str, dict[str, Estimate]]  # by group and metric


@dataclass(frozen=True)
class PerImage:
    """One metric of one run on U images; its mean over values is sums.sum() / counts.sum()."""

    ids: np.ndarray  # (U,) str, sorted
    sums: np.ndarray  # (U,) float64, of each image's values
    counts: np.ndarray  # (U,) float64, how many values each image has
    file: Path  # where they come from, for messages

    def __sub__(self, other: "PerImage") -> "PerImage":
        """Difference on the images that both have.

        Raises:
            InputError: an image has another number of values on the other side.
        """
        ids, own, others = np.intersect1d(self.ids, other.ids, assume_unique=True, return_indices=True)
        counts = self.counts[own]
        if len(unequal := np.flatnonzero(counts != other.counts[others])):
            raise InputError(
                f"image {ids[unequal[0]]} has {counts[unequal[0]]:g} values in {self.file} and "
                f"{other.counts[others][unequal[0]]:g} in {other.file}; compare runs on the same evaluation data"
            )
        return PerImage(ids, self.sums[own] - other.sums[others], counts, self.file)

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())


@dataclass(frozen=True)
class Scores:
    """Values of all metrics of one run, by group and metric; `<model>/difference` is own − shuffled images."""

    experiment: str
    seed: int
    groups: dict[str, dict[str, PerImage]]

    @property
    def run(self) -> str:
        return f"{self.experiment} with seed {self.seed}"


def read_scores(experiment: str, seed: int, *paths: str | Path) -> Scores:
    """Read a run's scores.jsonl, of one evaluation or more (see groups.score_rows for the rows)."""
    collected: dict[str, dict[str, tuple[Path, list[tuple[str, float, float]]]]] = {}
    for path in map(Path, paths):
        for row in read_jsonl(path):
            metrics = collected.setdefault(group_of(row), {})
            for metric, (total, count) in row["values"].items():
                metrics.setdefault(metric, (path, []))[1].append((row["id"], total, count))
    groups: dict[str, dict[str, PerImage]] = {}
    for group, metrics in collected.items():
        groups[group] = {metric: _per_image(path, rows) for metric, (path, rows) in metrics.items()}
        model = group.removesuffix("/shuffled")
        if model != group and (own := groups.get(f"{model}/own")):
            shuffled = groups[group]
            groups[f"{model}/difference"] = {name: own[name] - shuffled[name] for name in own if name in shuffled}
    return Scores(experiment, seed, groups)


def _per_image(path: Path, rows: list[tuple[str, float, float]]) -> PerImage:
    ids, sums, counts = zip(*sorted(rows), strict=True)
    return PerImage(np.array(ids), np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64), path)


def aggregate(runs: list[Scores]) -> Estimates:
    """Mean over the seeds of each seed's mean over values, with its 95 % interval, by group and metric.

    Raises:
        InputError: the runs do not measure the same things on the same images.
    """
    _check_same_images(runs)
    return _estimate({key: [run.groups[key[0]][key[1]] for run in runs] for key in _keys(runs[0])})


def paired_difference(runs: list[Scores], reference_runs: list[Scores]) -> Estimates:
    """Own − reference, paired by seed and image, on what both have: seeds, groups, metrics and images.

    Raises:
        InputError: they have no seed or no image in common, or an experiment's runs differ in their images.
    """
    _check_same_images(runs)
    _check_same_images(reference_runs)
    reference_of = {run.seed: run for run in reference_runs}
    pairs = [(run, reference_of[run.seed]) for run in runs if run.seed in reference_of]
    names = f"{runs[0].experiment} and {reference_runs[0].experiment}"
    if not pairs:
        own, other = ([run.seed for run in side] for side in (runs, reference_runs))
        raise InputError(
            f"{names} have no seed in common ({own} and {other}); give both at least one seed that is equal"
        )
    known = set(_keys(reference_runs[0]))
    differences = {
        (group, metric): [own.groups[group][metric] - other.groups[group][metric] for own, other in pairs]
        for group, metric in _keys(runs[0])
        if (group, metric) in known
    }
    differences = {key: values for key, values in differences.items() if len(values[0].ids)}
    if not differences:
        raise InputError(f"{names} have no evaluation image in common; compare experiments on the same dataset")
    return _estimate(differences)


def _keys(run: Scores) -> Iterator[tuple[str, str]]:
    return ((group, metric) for group, metrics in run.groups.items() for metric in metrics)


def _check_same_images(runs: list[Scores]) -> None:
    first, *others = runs
    for other in others:
        if unshared := set(_keys(first)) ^ set(_keys(other)):
            group, metric = min(unshared)
            has, lacks = (first, other) if metric in first.groups.get(group, {}) else (other, first)
            raise InputError(
                f"{has.run} has {metric} of {group} ({has.groups[group][metric].file}), {lacks.run} has not; "
                "run both evaluations again"
            )
        for group, metric in _keys(first):
            one, two = first.groups[group][metric], other.groups[group][metric]
            if not np.array_equal(one.ids, two.ids) or not np.array_equal(one.counts, two.counts):
                raise InputError(
                    f"{other.run}: {metric} of {group} in {two.file} is about other images than in {first.run} "
                    f"({len(two.ids)} and {len(one.ids)}); generate its answers again from the same evaluation split"
                )


def _estimate(values: dict[tuple[str, str], list[PerImage]]) -> Estimates:
    """Estimates from the values of S seeds; metrics with equally many images share their draws."""
    by_size: dict[int, list[tuple[str, str]]] = {}
    for key, seeds in values.items():
        by_size.setdefault(len(seeds[0].ids), []).append(key)
    resampled: dict[tuple[str, str], np.ndarray] = {}
    for keys in by_size.values():
        sums = np.stack([np.mean([seed.sums for seed in values[key]], axis=0) for key in keys])  # (M, U)
        counts = np.stack([values[key][0].counts for key in keys])  # (M, U)
        means = bootstrap_means(sums, counts, BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED)  # (samples, M)
        resampled |= dict(zip(keys, means.T, strict=True))
    estimates: Estimates = {}
    for (group, metric), seeds in values.items():
        means = np.array([seed.mean for seed in seeds])
        low, high = _interval(resampled[group, metric], means)
        estimates.setdefault(group, {})[metric] = {
            "n": int(seeds[0].counts.sum()),
            "mean": float(means.mean()),
            "low": low,
            "high": high,
            "seeds": len(seeds),
        }
    return estimates


def _interval(resampled: np.ndarray, means: np.ndarray) -> tuple[float, float]:
    """95 % interval from the resampled overall means (samples,) and the seeds' means (S,); see the top of the file."""
    if len(means) == 1:
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        return float(low), float(high)
    between_seeds = means.var(ddof=1) / len(means)
    variance = resampled.var(ddof=1) + between_seeds
    freedom = (len(means) - 1) * (variance / between_seeds) ** 2 if between_seeds else math.inf
    half = student_quantile(freedom) * math.sqrt(variance)
    return float(means.mean() - half), float(means.mean() + half)


def student_quantile(freedom: float) -> float:
    """The value that Student's t exceeds in absolute size with probability 0.05, for 1 or more degrees of freedom.

    From the density's integral on a grid; right to six digits.
    """
    freedom = min(freedom, 1e6)  # from there on it is the normal distribution, to six digits
    x = np.linspace(0, 13, 20_001)  # one degree of freedom has the largest quantile, 12.7
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * np.exp(-(freedom + 1) / 2 * np.log1p(x**2 / freedom))
    inside = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])]) * x[1] / 2
    return float(np.interp(CONFIDENCE / 2, inside, x))
