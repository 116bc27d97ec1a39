"""Pairs of experiments that a page compares, and the cost of deciding them.

The cost is additional seeds and images, their time, and the commands that add them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import pluralize
from dj2mgm.evaluation.contrast_verdicts import MAX_IMAGES, MAX_SEEDS, ContrastVerdict
from dj2mgm.evaluation.contrasts import PairedContrast
from dj2mgm.evaluation.sequential import find_deciding_budget
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.verdicts.verdict_sentences import build_snakemake_command
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.pages import choose_unused_seeds, sum_measured_seconds
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.verdict_kinds import VerdictKind


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


MAX_LISTED = 20  # additional seeds in a command
FURTHER_SEEDS = 2  # additional seeds that are advised after a single one
UNDECIDABLE = (
    f"Neither {MAX_SEEDS} more seeds nor {format_integer(MAX_IMAGES)} more held-out images would decide so small a "
    "difference with 80 % probability."
)


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
    return pluralize(number, "more held-out image", format_integer(number))


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
