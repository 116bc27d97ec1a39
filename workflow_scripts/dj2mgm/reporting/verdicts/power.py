"""Power of a comparison before it is run: the difference that it would show, and the time of one more seed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import InputError
from dj2mgm.evaluation.contrasts import PairedContrast, contrast_with_reference
from dj2mgm.evaluation.seeds import Scores, paired_values, read_run_scores
from dj2mgm.records.power_settings import FinishedRun, PowerSettings
from dj2mgm.reporting.comparison import SCORE_TITLES, format_difference
from dj2mgm.reporting.rendering import format_integer, join_words
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.studies.power_inputs import SCORED
from dj2mgm.runs.studies.seed_times import measured_seconds
from dj2mgm.settings.targets import ReportSection

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
SHOWN_SEEDS = (2, 3, 5, 10)


@dataclass(frozen=True)
class Noise:
    """Standard deviations of a difference from the reference at one image and between seeds, and their sources."""

    of_image: float
    of_seed: float
    sources: tuple[str, str]


def describe_power(settings: PowerSettings) -> str:
    """Return the smallest difference that the planned images and seeds show, and the cost of one more seed."""
    title, noise = SCORE_TITLES[settings.headline], find_noise(settings)
    if noise is None:
        return f"Power: the noise of the {title} is not known before a first run.\n"
    _, _, metric = ReportSection(headline=settings.headline).locate_headline()
    images = f"{format_integer(settings.images)} held-out images"
    images += "" if settings.images_are_known else " (assumed, since the dataset is not made yet)"

    def describe_smallest(seeds: int) -> str:
        return format_difference(metric, planned_contrast(noise, settings.images, seeds).detectable()).lstrip("+")

    first_row, *other_rows = (f"{describe_smallest(seeds)} with {seeds} seeds" for seeds in SHOWN_SEEDS)
    rows = ", ".join([first_row, *(row.removesuffix(" seeds") for row in other_rows)])
    lines = [
        f"Power: on {images}, the smallest true difference in the {title} that is found with 80 % probability is "
        f"{rows}."
    ]
    if settings.seeds == 1:
        lines.append(
            f"With one seed, as configured: {describe_smallest(1)}. Such a comparison is between the two trained "
            "models, not their data, because another seed changes the models."
        )
    elif settings.seeds not in SHOWN_SEEDS:
        lines.append(f"With {settings.seeds} seeds, as configured: {describe_smallest(settings.seeds)}.")
    lines.append(f"Noise: {join_words(list(noise.sources))}.")
    lines.append(_describe_time(settings))
    return "\n".join(lines) + "\n"


def planned_contrast(noise: Noise, images: int, seeds: int) -> PairedContrast:
    """Return the expected contrast with a number of images and seeds."""
    zero = np.zeros(())  # arrays without dimensions
    of_seeds = (zero, zero + np.inf) if seeds == 1 else (zero + noise.of_seed**2 / seeds, zero + seeds - 1)
    of_images = zero + noise.of_image**2 / images
    return PairedContrast(zero, images, images, seeds, of_images, images - 1, *of_seeds, zero > 0)


def find_noise(settings: PowerSettings) -> Noise | None:
    """Return the noise of finished runs, completed by typical noise; None if neither is known."""
    names = list(settings.finished)
    read = {name: _read(name, settings.finished[name], settings.headline) for name in names}
    read = {name: runs for name, runs in read.items() if runs}
    contrasts = _contrasts(read, settings.headline)
    typical = TYPICAL_NOISE.get(settings.headline)
    of_image, of_seed, sources = typical, typical and typical / np.sqrt(IMAGES_LIKE_SEEDS), ["typical", "typical"]
    if contrasts:
        of_image = float(
            np.sqrt(np.mean([contrast.image_variance * contrast.images for contrast in contrasts.values()]))
        )
        sources[0] = f"measured on {join_words(list(contrasts))}"
        of_seed = of_seed or of_image / np.sqrt(IMAGES_LIKE_SEEDS)
    several = {name: contrast for name, contrast in contrasts.items() if contrast.seeds > 1}
    if several:
        of_seed = float(np.sqrt(np.mean([contrast.seed_variance * contrast.seeds for contrast in several.values()])))
        sources[1] = f"measured on {join_words(list(several))}"
    elif runs := next((runs for runs in read.values() if len(runs) > 1), None):
        means = [run.mean for run in _values(runs, settings.headline)]
        of_seed = float(np.sqrt(2 * np.var(means, ddof=1)))
        sources[1] = f"measured on {runs[0].experiment}"
    if of_image is None or of_seed is None:
        return None
    _, _, metric = ReportSection(headline=settings.headline).locate_headline()
    words = [
        f"{format_difference(metric, value).lstrip('+')} {kind} ({source})"
        for value, kind, source in zip((of_image, of_seed), ("per image", "between seeds"), sources, strict=True)
    ]
    return Noise(of_image, of_seed, (words[0], words[1]))


def _read(name: str, runs: list[FinishedRun], headline: str) -> list[Scores]:
    """Return the scores of runs that have the headline."""
    _, group, metric = ReportSection(headline=headline).locate_headline()
    read = [
        read_run_scores(name, run.seed, *(Path(run.stages[stage], "scores.jsonl") for stage in SCORED)) for run in runs
    ]
    return [run for run in read if metric in run.groups.get(group, {})]


def _values(runs: list[Scores], headline: str) -> list:
    _, group, metric = ReportSection(headline=headline).locate_headline()
    return [run.groups[group][metric] for run in runs]


def _contrasts(read: dict[str, list[Scores]], headline: str) -> dict[str, PairedContrast]:
    """Return the contrast of each experiment that shares a seed and images with the first one."""
    _, group, metric = ReportSection(headline=headline).locate_headline()
    names, values = list(read), {}
    for name in names[1:]:
        try:
            values[name] = paired_values(read[name], read[names[0]])[group, metric]
        except InputError:  # no common seed, or other images
            continue
    contrasts = dict(zip(values, contrast_with_reference(list(values.values())), strict=True))
    return {
        name: contrast for name, contrast in contrasts.items() if contrast.images > 1 and np.any(contrast.variance > 0)
    }


def _describe_time(settings: PowerSettings) -> str:
    names = [name for name in dict.fromkeys([settings.experiment, REFERENCE]) if name in settings.finished]
    seconds = measured_seconds(settings.finished[name][-1].stages for name in names)
    if seconds is None:
        return "The time of one more seed is known after a first run."
    return f"One more seed of {join_words(names)} takes about {format_duration(seconds)}, as measured in the last run."
