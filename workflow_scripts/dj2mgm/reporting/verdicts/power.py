"""Noise of a comparison before it is run, from finished runs or typical: it determines what the comparison shows."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import chdtri

from dj2mgm.errors import InputError
from dj2mgm.evaluation.contrasts import PairedContrast, contrast_with_reference
from dj2mgm.evaluation.run_scores import RunScores, pair_values, read_run_scores
from dj2mgm.reporting.comparison import format_difference
from dj2mgm.reporting.rendering import join_words
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.pages import SCORED_STAGES
from dj2mgm.settings.base import Section, Seed, setting
from dj2mgm.settings.targets import Headline

# Standard deviations of the difference at one held-out image, used before there are finished runs. They were measured
# for `dj_synth` and `baseline` on the embedded dataset (docs/evaluation.md).
TYPICAL_NOISE = {
    "answer_probability": 0.08,
    "vqa_accuracy": 0.18,
    "answer_log_likelihood": 0.19,
    "likelihood_gain": 0.70,
    "caption_log_likelihood": 0.21,
}
# The standard deviation between seeds is assumed to equal that of the mean over this number of images.
IMAGES_LIKE_SEEDS = 500


class FinishedRun(Section):
    """A finished run, which shows how much scores vary."""

    seed: Seed = setting()
    stages: dict[str, str] = setting(..., "folder of each stage")
    time: float = setting(..., "time stamp of its scores; with a newer one, the analysis runs again")


class PowerSettings(Section):
    """Settings of a power analysis."""

    headline: Headline = setting()
    experiment: str = setting(..., "experiment that is compared with the reference")
    images: int = setting(..., "number of held-out images")
    images_are_known: bool = setting(..., "false: the dataset is not made yet, and `images` is an assumption")
    seeds: int = setting()
    finished: dict[str, list[FinishedRun]] = setting(..., "finished runs by experiment, the reference first")


@dataclass(frozen=True)
class Noise:
    """Standard deviations of a difference from the reference: at one image and between seeds, with their sources.

    Attributes:
        image_noise: standard deviation at one image.
        seed_noise: standard deviation between seeds.
        sources: both as text.
        seed_df: degrees of freedom of the estimate of `seed_noise`; infinite if it is typical.
    """

    image_noise: float
    seed_noise: float
    sources: tuple[str, str]
    seed_df: float = np.inf

    def at_quantile(self, share: float = 0.5) -> "Noise":
        """Return the noise whose part between seeds exceeds the true one with this probability."""
        if not np.isfinite(self.seed_df):
            return self
        return replace(self, seed_noise=self.seed_noise * float(np.sqrt(self.seed_df / chdtri(self.seed_df, share))))


def compute_expected_contrast(noise: Noise, images: int, seeds: int) -> PairedContrast:
    """Return a contrast with a mean of 0, and with this noise over the given images and seeds."""
    zero = np.zeros(())  # arrays without dimensions
    seed_part = (zero, zero + np.inf) if seeds == 1 else (zero + noise.seed_noise**2 / seeds, zero + seeds - 1)
    image_part = zero + noise.image_noise**2 / images
    return PairedContrast(zero, images, images, seeds, image_part, images - 1, *seed_part, zero > 0)


def find_noise(settings: PowerSettings, group: str, metric: str) -> Noise | None:
    """Return the noise of finished runs, completed by typical noise; None if neither is known.

    Args:
        settings: the settings.
        group: group of the headline.
        metric: metric of the headline.
    """
    scores = {name: _read_scores(name, runs, group, metric) for name, runs in settings.finished.items()}
    scores = {name: runs for name, runs in scores.items() if runs}
    contrasts = _compute_contrasts(scores, group, metric)
    typical = TYPICAL_NOISE.get(settings.headline)
    image_noise, seed_noise, sources = typical, typical and typical / np.sqrt(IMAGES_LIKE_SEEDS), ["typical", "typical"]
    seed_df = np.inf
    if contrasts:
        image_noise = float(
            np.sqrt(np.mean([contrast.image_variance * contrast.images for contrast in contrasts.values()]))
        )
        sources[0] = f"measured on {join_words(list(contrasts))}"
        seed_noise = seed_noise or image_noise / np.sqrt(IMAGES_LIKE_SEEDS)
    repeated = {name: contrast for name, contrast in contrasts.items() if contrast.seeds > 1}
    if repeated:
        variances = [contrast.seed_variance * contrast.seeds for contrast in repeated.values()]
        seed_noise = float(np.sqrt(np.mean(variances)))
        seed_df = max(contrast.seeds for contrast in repeated.values()) - 1  # all share the noise of the reference
        sources[1] = f"measured on {join_words(list(repeated))}"
    elif runs := next((runs for runs in scores.values() if len(runs) > 1), None):
        means = [run.groups[group][metric].mean for run in runs]
        seed_noise, seed_df = float(np.sqrt(2 * np.var(means, ddof=1))), len(means) - 1
        sources[1] = f"measured on {runs[0].experiment}"
    if image_noise is None or seed_noise is None:
        return None
    image_text, seed_text = (
        f"{format_difference(metric, value).lstrip('+')} {kind} ({source})"
        for value, kind, source in zip((image_noise, seed_noise), ("per image", "between seeds"), sources, strict=True)
    )
    return Noise(image_noise, seed_noise, (image_text, seed_text), seed_df)


def _read_scores(name: str, runs: list[FinishedRun], group: str, metric: str) -> list[RunScores]:
    """Return the scores of the runs that have the metric."""
    scores = [
        read_run_scores(name, run.seed, *(Path(run.stages[stage], "scores.jsonl") for stage in SCORED_STAGES))
        for run in runs
    ]
    return [run for run in scores if metric in run.groups.get(group, {})]


def _compute_contrasts(scores: dict[str, list[RunScores]], group: str, metric: str) -> dict[str, PairedContrast]:
    """Return the contrast of each experiment that shares a seed and images with the reference."""
    values, reference_runs = {}, scores.get(REFERENCE)
    for name, runs in scores.items():
        if reference_runs is None or name == REFERENCE:
            continue
        try:
            values[name] = pair_values(runs, reference_runs)[group, metric]
        except InputError:  # no common seed, or other images
            continue
    # not pooled, because a page gives each experiment at least the noise of the others
    contrasts = {name: contrast_with_reference([differences])[0] for name, differences in values.items()}
    return {
        name: contrast for name, contrast in contrasts.items() if contrast.images > 1 and np.any(contrast.variance > 0)
    }
