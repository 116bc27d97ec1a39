"""Noise of a comparison before it is run, pairs of experiments that a page compares, and the cost of deciding.

The cost is additional seeds and images, their time, and the commands that add them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import chdtri

from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import InputError, pluralize
from dj2mgm.evaluation.contrast_verdicts import MAX_IMAGES, MAX_SEEDS, ContrastVerdict, find_deciding_budget
from dj2mgm.evaluation.contrasts import PairedContrast, contrast_with_reference
from dj2mgm.evaluation.run_scores import RunScores, pair_values, read_run_scores
from dj2mgm.reporting.comparison import format_difference
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_integer, join_words
from dj2mgm.reporting.verdicts.verdict_sentences import build_snakemake_command
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.pages import SCORED_STAGES, choose_unused_seeds, sum_measured_seconds
from dj2mgm.settings.base import Section, Seed, setting
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.settings.targets import DecisionBudget, Headline
from dj2mgm.verdict_kinds import VerdictKind

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
MAX_LISTED = 20  # additional seeds in a command
FURTHER_SEEDS = 2  # additional seeds that are advised after a single one
UNDECIDABLE = (
    f"Neither {MAX_SEEDS} more seeds nor {format_integer(MAX_IMAGES)} more held-out images would decide so small a "
    "difference with 80 % probability."
)


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


@dataclass(frozen=True)
class ExperimentPair:
    """Two experiments that a page compares.

    Attributes:
        subject: the experiment under whose name the verdict is shown. It is `experiment`, or the control that this
            comparison belongs to.
    """

    experiment: ExperimentResults
    reference: ExperimentResults
    subject: ExperimentResults

    @property
    def owner(self) -> str:
        """Target of Snakemake whose page shows the comparison: the experiment, or the control's experiment."""
        return self.subject.control.experiment if self.subject.control else self.experiment.name

    @property
    def can_be_decided(self) -> bool:
        """True if `snakemake decide` makes this comparison."""
        return self.subject.control is None and self.reference.name == REFERENCE


def find_comparisons(experiments: list[ExperimentResults]) -> list[ExperimentPair]:
    """Return the comparisons of a page: each later experiment with the first one, and the controls' comparisons."""
    reference, *later_experiments = experiments
    by_name = {experiment.name: experiment for experiment in experiments}
    pairs = [
        (experiment, experiment.control.compared if experiment.control else (experiment.name, reference.name))
        for experiment in later_experiments
    ]
    return [ExperimentPair(by_name[pair[0]], by_name[pair[1]], subject) for subject, pair in pairs if pair]


def find_controls(experiments: list[ExperimentResults], comparison: ExperimentPair) -> list[str]:
    """Return the kinds of controls that a page has of a compared experiment."""
    kinds = [
        experiment.control.kind
        for experiment in experiments
        if experiment.control and experiment.control.experiment == comparison.owner
    ]
    return list(dict.fromkeys(kinds))


def is_learning_rate_control(subject: ExperimentResults) -> bool:
    """Return whether this is the control at half of the learning rates, which repeats its experiment's verdict."""
    return subject.control is not None and subject.control.kind == "half_learning_rate"


def advise_next_step(
    contrast_verdict: ContrastVerdict,
    contrast: PairedContrast,
    margin: float,
    comparison: ExperimentPair,
    controls: list[str],
    target: str,
) -> tuple[str, str]:
    """Return the cost of a decision as a sentence, and the command for it; empty if nothing more is needed."""
    sentence, more = _describe_cost(
        contrast_verdict, contrast, compute_seconds_per_seed([comparison.experiment, comparison.reference])
    )
    if not more:
        return sentence, ""
    can_be_decided = comparison.can_be_decided and not target and "decide" in TARGETS_BY_KEY
    if contrast_verdict.kind == VerdictKind.UNDECIDED and can_be_decided:
        budget = contrast.seeds + more
        if contrast.seeds > 1:
            budget = find_deciding_budget(contrast, margin) or budget
        budget = max(budget, DecisionBudget().seeds)
        advice = (
            f"This command adds seeds one by one until the verdict is decided, up to {budget} per experiment in all:"
        )
        return f"{sentence} {advice}", _build_decide_command(comparison, budget)
    return sentence, _build_seeds_command(comparison, more, controls, target or comparison.owner)


def _describe_cost(
    contrast_verdict: ContrastVerdict, contrast: PairedContrast, seconds: float | None
) -> tuple[str, int]:
    """Return the cost of a decision as a sentence, and the number of additional seeds in it."""
    if contrast.images < 2:
        return "Hold out more images.", 0
    images = ""
    if contrast_verdict.cost.images:
        images = describe_images(contrast_verdict.cost.images)
    if contrast.seeds == 1:
        more = FURTHER_SEEDS
        text = f"With {describe_seeds(more, seconds)} the verdict is about the data, "
        text += "not only about these two models."
        text += f" For these two models, {images} would decide." if images else ""
        return text, more
    if contrast_verdict.kind != VerdictKind.UNDECIDED:
        return "", 0
    if more := contrast_verdict.cost.seeds:
        seeds = describe_seeds(more, seconds)
        return state_cost(f"{seeds} or {images}" if images else seeds), more
    if images:
        return state_cost(images, images_only=True), 0
    if contrast_verdict.cost.both:
        more, added = contrast_verdict.cost.both
        return state_cost(f"{describe_seeds(more, seconds)} and {describe_images(added)} together"), more
    return UNDECIDABLE, 0


def state_cost(options: str, *, images_only: bool = False) -> str:
    """Return the sentence on seeds and images that would decide a difference.

    Args:
        options: the seeds and images.
        images_only: whether only more images would decide.
    """
    ending = "; more seeds alone would not" if images_only else ""
    return f"If the true difference equals the measured one, {options} would decide with 80 % probability{ending}."


def describe_seeds(more: int, seconds: float | None) -> str:
    """Return a number of additional seeds, and their total time if `seconds`, the time of one seed, is known."""
    duration = "" if seconds is None else f" (about {format_duration(more * seconds)})"
    return f"{pluralize(more, 'more seed')} of both experiments{duration}"


def describe_images(more: int) -> str:
    """Return a number of further images, rounded up to two digits."""
    unit = 10 ** max(0, len(str(more)) - 2)
    number = -(-more // unit) * unit
    return pluralize(number, "more held-out image")


def _build_decide_command(comparison: ExperimentPair, budget: int) -> str:
    """Return the command that adds seeds until the verdict is decided or there are `budget` seeds."""
    seeds, settings = comparison.experiment.seeds, {"experiment": comparison.experiment.name}
    if seeds != list(range(len(seeds))):  # the budget's seeds continue those of the configuration
        settings["seeds"] = f"[{','.join(map(str, seeds))}]"
    if budget > DecisionBudget().seeds:
        settings["decide"] = f"{{seeds: {budget}}}"
    return build_snakemake_command(comparison.reference, "decide", **settings)


def _build_seeds_command(comparison: ExperimentPair, more: int, controls: list[str], target: str) -> str:
    """Return the command that adds this number of seeds to a page."""
    if more > MAX_LISTED:
        return ""
    seeds = sorted({*comparison.experiment.seeds} & {*comparison.reference.seeds})
    seed_list = ",".join(map(str, [*seeds, *choose_unused_seeds(seeds, more)]))
    settings = {"controls": f"[{','.join(controls)}]"} if controls else {}
    return build_snakemake_command(comparison.reference, target, seeds=f"[{seed_list}]", **settings)


def compute_seconds_per_seed(experiments: Iterable[ExperimentResults]) -> float | None:
    """Return the time of the stages that another seed of these experiments would run, as measured; None if unknown."""
    return sum_measured_seconds(experiment.runs[-1].stages for experiment in experiments)
