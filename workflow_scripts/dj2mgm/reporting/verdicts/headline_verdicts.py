"""The verdict on each experiment by the headline score: how sure it is, what it cost, and what would decide it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dj2mgm.evaluation.contrasts import ContrastVerdict, PairedContrast, PairedValues, contrast_with_reference, decide
from dj2mgm.evaluation.groups import find_score_range
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.seeds import estimate_difference, pair_values
from dj2mgm.evaluation.sequential import find_deciding_budget
from dj2mgm.reporting.commands import build_snakemake_command
from dj2mgm.reporting.comparison import (
    LOWER_IS_BETTER,
    SCORE_TITLES,
    classify_difference,
    describe_obstacles,
    find_obstacle,
    format_difference,
    format_interval,
    format_score,
    select_comparable_scores,
)
from dj2mgm.reporting.experiment import ExperimentResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.verdicts.learning_faults import LearningFault, estimate_image_gain, find_learning_faults
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.studies.seed_times import sum_measured_seconds
from dj2mgm.settings.targets import OWN_GROUP, DecideSection

MAX_LISTED = 20  # additional seeds in a command
FURTHER_SEEDS = 2  # additional seeds that are advised after a single one


@dataclass(frozen=True)
class HeadlineScore:
    """The score that decides, declared before the results are seen."""

    title: str
    group: str
    metric: str
    margin: float

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER


@dataclass(frozen=True)
class ExperimentPair:
    """Two experiments that a page compares.

    Attributes:
        subject: `experiment`, or the control experiment that defines this comparison. The verdict is shown under its
            name.
    """

    experiment: ExperimentResults
    reference: ExperimentResults
    subject: ExperimentResults

    @property
    def owner(self) -> str:
        """The target of Snakemake whose page shows the comparison: the experiment, or the control's experiment."""
        return self.subject.control.experiment if self.subject.control else self.experiment.name

    @property
    def can_be_decided(self) -> bool:
        """True if `snakemake decide` makes this comparison."""
        return self.subject.control is None and self.reference.name == REFERENCE


@dataclass(frozen=True)
class HeadlineVerdict:
    """Verdict on one comparison, shown under the name of its subject."""

    experiment: str
    index: int  # the experiment's position on the page, for its color
    description: str
    kind: str = ""  # better, worse, equivalent or undecided; empty without a verdict
    lead: str = ""  # statement in three parts; the second part is emphasized
    emphasis: str = ""
    rest: str = ""
    certainty: str = ""
    next_step: str = ""
    command: str = ""

    @property
    def statement(self) -> str:
        return f"{self.lead}{self.emphasis}{self.rest}"


def find_headline(experiments: list[ExperimentResults], share_of_rows: float = 1) -> HeadlineScore:
    """Return the score that decides between trainings on this share of the rows (`ReportSection.locate_headline`)."""
    settings = experiments[0].config.report
    has_questions = any(run.vqa["questions"] for experiment in experiments for run in experiment.runs)
    key, group, metric = settings.locate_headline(has_questions, share_of_rows)
    return HeadlineScore(SCORE_TITLES[key], group, metric, settings.margin)


def find_comparisons(experiments: list[ExperimentResults]) -> list[ExperimentPair]:
    """Return the comparisons of a page: each later experiment with the first one, and the controls' comparisons."""
    reference, *later_experiments = experiments
    by_name = {experiment.name: experiment for experiment in experiments}
    pairs = [
        (experiment, experiment.control.compared if experiment.control else (experiment.name, reference.name))
        for experiment in later_experiments
    ]
    return [ExperimentPair(by_name[pair[0]], by_name[pair[1]], subject) for subject, pair in pairs if pair]


def build_headline_verdicts(experiments: list[ExperimentResults], target: str = "") -> list[HeadlineVerdict]:
    """Return the verdicts on all comparisons of a page, or the verdict on a single experiment.

    Args:
        experiments: the reference, and the others.
        target: Snakemake target of a page of variants; empty for a page of experiments, which are targets.
    """
    headline = find_headline(experiments)
    if len(experiments) == 1:
        return [_judge_single(experiments[0], headline)]
    comparisons = find_comparisons(experiments)
    key = headline.group, headline.metric
    contrasts, pooled_experiments = _compute_contrasts(comparisons, experiments, key)
    decisions = decide(list(contrasts.values()), headline.margin, headline.lower_is_better)
    contrast_verdicts = dict(zip(contrasts, decisions, strict=True))
    unlearned = find_unlearned(experiments)
    indices = {experiment.name: index for index, experiment in enumerate(experiments)}
    verdicts: list[HeadlineVerdict] = []
    for number, comparison in enumerate(comparisons):
        experiment, reference, subject = comparison.experiment, comparison.reference, comparison.subject
        index = indices[subject.name]
        if names := [name for name in (experiment.name, reference.name) if name in unlearned]:
            verdicts.append(_withhold_verdict(subject, index, names))
            continue
        if number not in contrasts:
            verdicts.append(_report_missing(subject, index, describe_missing(headline, experiment, reference)))
            continue
        contrast, contrast_verdict = contrasts[number], contrast_verdicts[number]
        beginning = ""
        if is_learning_rate_control(subject):
            kinds = {verdict.experiment: verdict.kind for verdict in verdicts}
            beginning = describe_repetition(kinds.get(subject.control.experiment, ""), contrast_verdict.kind)
        difference = estimate_difference(contrast, *key)
        lead, emphasis, rest = _write_statement(
            contrast_verdict.kind, experiment, reference, headline, difference, beginning
        )
        controls = [] if target else find_controls(experiments, comparison)
        step, command = _advise_next_step(contrast_verdict, contrast, headline.margin, comparison, controls, target)
        verdicts.append(
            HeadlineVerdict(
                experiment=subject.name,
                index=index,
                description=subject.description,
                kind=contrast_verdict.kind,
                lead=lead,
                emphasis=emphasis,
                rest=rest,
                certainty=_describe_certainty(
                    contrast_verdict, contrast, headline, len(contrasts), pooled_experiments[number]
                ),
                next_step=step,
                command=command,
            )
        )
    return verdicts


def is_learning_rate_control(subject: ExperimentResults) -> bool:
    """Return whether this is the control at half of the learning rates, which repeats its experiment's verdict."""
    return subject.control is not None and subject.control.kind == "half_learning_rate"


def describe_repetition(kind: str, repeated_kind: str) -> str:
    """Return the beginning of a statement at half of the learning rates: whether the verdict is the same."""
    if not kind:
        return "At half of the learning rates, "
    outcome = "is the same" if kind == repeated_kind else f"changes (no longer “{kind}”)"
    return f"At half of the learning rates, the verdict {outcome}: "


def _compute_contrasts(
    comparisons: list[ExperimentPair], experiments: list[ExperimentResults], key: tuple[str, str]
) -> tuple[dict[int, PairedContrast], dict[int, int]]:
    """Return each measured comparison's contrast, and the number of experiments that its seed noise is estimated from.

    Keys are indices of `comparisons`. All experiments of the page count for the noise, as in its tables.
    """
    contrasts, pooled_experiments = {}, {}
    for reference in {comparison.reference.name: comparison.reference for comparison in comparisons}.values():
        other_experiments = [experiment for experiment in experiments if experiment.name != reference.name]
        optional_values = {
            experiment.name: pair_values(*select_comparable_scores(experiment, reference)).get(key)
            for experiment in other_experiments
        }
        values = {name: value for name, value in optional_values.items() if value is not None}
        by_name = dict(zip(values, contrast_with_reference(list(values.values())), strict=True))
        for number, comparison in enumerate(comparisons):
            if comparison.reference.name == reference.name and comparison.experiment.name in by_name:
                contrasts[number], pooled_experiments[number] = by_name[comparison.experiment.name], len(values)
    return dict(sorted(contrasts.items())), pooled_experiments


def find_unlearned(experiments: list[ExperimentResults]) -> dict[str, list[LearningFault]]:
    """Return the signs that models have learned nothing, by experiment; only experiments with such signs."""
    headline = find_headline(experiments)
    title = SCORE_TITLES[headline.metric]
    faults_by_name = {
        experiment.name: find_learning_faults(experiment, headline.metric, title) for experiment in experiments
    }
    return {name: faults for name, faults in faults_by_name.items() if faults}


def _withhold_verdict(experiment: ExperimentResults, index: int, names: list[str]) -> HeadlineVerdict:
    reason = f"The verdict is withheld, because {' and '.join(names)} learned nothing."
    return HeadlineVerdict(experiment.name, index, experiment.description, lead=reason)


def _write_statement(
    kind: str,
    experiment: ExperimentResults,
    reference: ExperimentResults,
    headline: HeadlineScore,
    difference: Estimate,
    beginning: str = "",
) -> tuple[str, str, str]:
    """Return the statement of a verdict in three parts; the second part is emphasized.

    `beginning` is the beginning of the sentence if the verdict repeats another verdict.
    """
    metric, one_seed = headline.metric, difference.seeds == 1
    scores = [format_score(metric, side.groups[headline.group][metric].mean) for side in (experiment, reference)]
    measurement = _describe_difference(metric, difference)
    start = beginning + (("for" if beginning else "For") + " these two models, " if one_seed else "")
    if kind in ("better", "worse"):
        rest = f" than {reference.name}: {headline.title} {scores[0]} instead of {scores[1]} ({measurement})."
        return f"{start}{experiment.name} is ", kind, rest
    if kind == "equivalent":
        margin = format_difference(metric, headline.margin).lstrip("+")
        rest = f": {headline.title} {scores[0]} and {scores[1]} ({measurement}), within the margin of {margin}."
        return f"{start}{experiment.name} and {reference.name} are ", kind, rest
    scope = " for these two models" if one_seed else ""
    question = f"{scope} whether {experiment.name} is better than {reference.name}"
    emphasis = "undecided" if beginning else "Undecided"
    return beginning, emphasis, f"{question}: {headline.title} {scores[0]} compared with {scores[1]} ({measurement})."


def _describe_certainty(
    contrast_verdict: ContrastVerdict,
    contrast: PairedContrast,
    headline: HeadlineScore,
    comparisons: int,
    pooled_experiments: int,
) -> str:
    """Return how sure a verdict is.

    Args:
        contrast_verdict: the verdict.
        contrast: the difference.
        headline: the score that decides.
        comparisons: number of comparisons that the p-values are corrected for.
        pooled_experiments: number of experiments that share the noise between seeds, without the reference.
    """
    qualifier = "the corrected" if comparisons > 1 else "its"
    corrected = f", corrected for {comparisons} comparisons" if comparisons > 1 else ""
    seeds = f"{contrast.seeds} seeds" if contrast.seeds > 1 else "one seed"
    sample = f"{format_integer(contrast.images)} images and {seeds}"
    if contrast_verdict.kind == "undecided" and contrast_verdict.detectable is None:
        return "At least two images are needed."
    low, high = find_score_range(headline.metric)
    if contrast_verdict.kind == "undecided" and not contrast_verdict.detectable < high - low:
        text = f"With {sample}, even the largest possible difference is found with less than 80 % power{corrected}."
    elif contrast_verdict.kind == "undecided":
        change = format_difference(headline.metric, contrast_verdict.detectable).lstrip("+")
        text = f"With {sample}, the smallest difference found with 80 % power is {change}{corrected}."
        if abs(contrast.mean) > contrast.half_width():
            text += f" The interval excludes zero, but {qualifier} p-value is {contrast_verdict.p_value:.2g}."
    elif contrast_verdict.kind == "equivalent":
        text = f"Measured with {sample}."
    else:
        share = "less than 0.1" if contrast_verdict.p_value < 0.001 else f"{100 * contrast_verdict.p_value:.2g}"
        if contrast.seeds == 1:
            images = format_integer(contrast.images)
            chance = f"If the models were equally good, {share} % of samples of {images} images would show"
        else:
            chance = f"If the data were equally good, {share} % of repetitions with {sample} would find"
        text = f"{chance} a difference this large{corrected}."
    if contrast_verdict.kind == "undecided" and abs(contrast.mean) <= contrast.half_width():
        text = f"The interval contains zero, so either side may be better. {text}"
    if contrast.seeds == 1:
        text += " One seed does not show how much the scores would change with another seed."
    elif pooled_experiments > 1:
        source = "from this experiment alone, because it is larger than in the others"
        text += (
            f" The noise between seeds is estimated {source if contrast.noisy else 'from all experiments of the page'}."
        )
    return text


def find_controls(experiments: list[ExperimentResults], comparison: ExperimentPair) -> list[str]:
    """Return the kinds of controls that a page has of a compared experiment."""
    kinds = [
        experiment.control.kind
        for experiment in experiments
        if experiment.control and experiment.control.experiment == comparison.owner
    ]
    return list(dict.fromkeys(kinds))


def _advise_next_step(
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
    if contrast_verdict.kind == "undecided" and comparison.can_be_decided and not target:
        budget = contrast.seeds + more
        if contrast.seeds > 1:
            budget = find_deciding_budget(contrast, margin) or budget
        budget = max(budget, DecideSection().seeds)
        advice = (
            f"This command adds seeds one by one until the verdict is decided, up to {budget} per experiment in all:"
        )
        return f"{sentence} {advice}", _build_decide_command(comparison, budget)
    return sentence, _build_seeds_command(comparison, more, controls, target or comparison.owner)


def _describe_cost(
    contrast_verdict: ContrastVerdict, contrast: PairedContrast, seconds: float | None
) -> tuple[str, int]:
    """Return the cost of a decision as a sentence, and the number of additional seeds in it."""
    images = ""
    if contrast_verdict.cost.images:
        images = describe_images(contrast_verdict.cost.images)
    if contrast.seeds == 1:
        more = FURTHER_SEEDS
        text = f"With {describe_seeds(more, seconds)} the verdict is about the data, "
        text += "not only about these two models."
        text += f" For these two models, {images} would decide." if images else ""
        return text, more
    if contrast_verdict.kind != "undecided":
        return "", 0
    if more := contrast_verdict.cost.seeds:
        seeds = describe_seeds(more, seconds)
        options = f"{seeds} or {images}" if images else seeds
        verb = "decides" if more == 1 and not images else "decide"
        return f"{options} {verb} with 80 % probability if the true difference is as measured.", more
    if images:
        return (
            f"{images} decide with 80 % probability if the true difference is as measured; more seeds alone do not.",
            0,
        )
    if contrast_verdict.cost.both:
        more, added = contrast_verdict.cost.both
        options = f"{describe_seeds(more, seconds)} and {describe_images(added)} "
        return f"{options}together decide with 80 % probability if the true difference is as measured.", more
    return "No affordable number of seeds and images decides a difference as small as this.", 0


def describe_seeds(more: int, seconds: float | None) -> str:
    """Return a number of additional seeds, and their total time if `seconds`, the time of one seed, is known."""
    return f"{more} more {'seed' if more == 1 else 'seeds'} of both experiments{_describe_duration(more, seconds)}"


def describe_images(more: int) -> str:
    """Return a number of further images, rounded up to two digits."""
    unit = 10 ** max(0, len(str(more)) - 2)
    return f"{format_integer(-(-more // unit) * unit)} more held-out image{'' if more == 1 else 's'}"


def _describe_duration(seeds: int, seconds: float | None) -> str:
    """Return the time of some seeds in seconds, minutes or hours."""
    if seconds is None:
        return ""
    total = seeds * seconds
    if total < 90:
        return f" (about {total:.0f} seconds)"
    return f" (about {total / 60:.0f} minutes)" if total < 120 * 60 else f" (about {total / 3600:.1f} hours)"


def _build_decide_command(comparison: ExperimentPair, budget: int) -> str:
    """Return the command that adds seeds until the verdict is decided or there are `budget` seeds."""
    seeds, settings = comparison.experiment.seeds, {"experiment": comparison.experiment.name}
    if seeds != list(range(len(seeds))):  # the budget's seeds continue those of the configuration
        settings["seeds"] = f"[{','.join(map(str, seeds))}]"
    if budget > DecideSection().seeds:
        settings["decide"] = f"{{seeds: {budget}}}"
    return build_snakemake_command(comparison.reference, "decide", **settings)


def _build_seeds_command(comparison: ExperimentPair, more: int, controls: list[str], target: str) -> str:
    """Return the command that adds this number of seeds to a page."""
    if more > MAX_LISTED:
        return ""
    seeds = sorted({*comparison.experiment.seeds} & {*comparison.reference.seeds})
    candidates = (seed for seed in range(len(seeds) + more + max(seeds) + 1) if seed not in seeds)
    seed_list = ",".join(str(seed) for seed in [*seeds, *(next(candidates) for _ in range(more))])
    settings = {"controls": f"[{','.join(controls)}]"} if controls else {}
    return build_snakemake_command(comparison.reference, target, seeds=f"[{seed_list}]", **settings)


def compute_seconds_per_seed(experiments: Iterable[ExperimentResults]) -> float | None:
    """Return the time of the stages that another seed of these experiments would run, as measured; None if unknown."""
    return sum_measured_seconds(experiment.runs[-1].stages for experiment in experiments)


def _report_missing(experiment: ExperimentResults, index: int, reason: str) -> HeadlineVerdict:
    return HeadlineVerdict(experiment.name, index, experiment.description, lead=reason)


def describe_missing(headline: HeadlineScore, experiment: ExperimentResults, reference: ExperimentResults) -> str:
    """Return why two experiments cannot be compared by the headline."""
    if find_obstacle(headline.metric, experiment, reference):
        return " ".join(["There is no verdict.", *describe_obstacles(experiment, reference)])
    names = [
        side.name for side in (experiment, reference) if headline.metric not in side.groups.get(headline.group, {})
    ]
    return _describe_unmeasured(headline, names)


def _describe_unmeasured(headline: HeadlineScore, names: list[str]) -> str:
    return (
        f"There is no verdict: the {headline.title} of {' and '.join(names)} was not measured. Results of an earlier "
        "version lack it; run their target again, or choose another report.headline."
    )


def _judge_single(experiment: ExperimentResults, headline: HeadlineScore) -> HeadlineVerdict:
    """Return the verdict on a single experiment.

    Its score with its own images is compared with its score with shuffled images and with the score before training.
    """
    groups, metric = experiment.groups, headline.metric
    own_estimate, gain = groups.get(OWN_GROUP, {}).get(metric), estimate_image_gain(experiment, metric)
    if own_estimate is None or gain is None:
        reason = _describe_unmeasured(headline, [experiment.name])
        return HeadlineVerdict(experiment.name, 0, experiment.description, lead=reason)
    title, show = SCORE_TITLES[metric], partial(format_score, metric)
    shuffled = show(groups["finetune/shuffled"][metric].mean)
    uses_images = gain.is_above_zero
    measurement = (
        f"{title} {show(own_estimate.mean)} instead of {shuffled} with shuffled images "
        f"({_describe_difference(metric, gain)})"
    )
    emphasis, kind = ("uses its images", "better") if uses_images else ("is not shown to use its images", "undecided")
    rest = f": {measurement}."
    if contrast := change_by_training(experiment, OWN_GROUP, metric):
        training = estimate_difference(contrast, OWN_GROUP, metric)
        base, change = show(groups["base/own"][metric].mean), f"({_describe_difference(metric, training)})"
        rest = f": {measurement}, compared with {base} before training {change}."
        training_verdict = classify_difference(metric, training)
        if training_verdict == "worse":
            emphasis, kind = "is worse than before training", "worse"
            rest = f": {title} {show(own_estimate.mean)} instead of {base} {change}."
        elif uses_images:
            relation = "is better than" if training_verdict == "better" else "is not shown to differ from"
            rest = f", and {relation} before training{rest}"
    seeds = "one seed" if own_estimate.seeds == 1 else f"{own_estimate.seeds} seeds"
    certainty = f"Measured on {format_integer(own_estimate.images)} held-out images with {seeds}."
    return HeadlineVerdict(
        experiment.name, 0, experiment.description, kind, "The fine-tuned model ", emphasis, rest, certainty
    )


def _describe_difference(metric: str, difference: Estimate) -> str:
    interval = format_interval(metric, difference, format_difference)
    return f"{format_difference(metric, difference.mean)}; 95 % interval {interval}"


def change_by_training(experiment: ExperimentResults, group: str, metric: str) -> PairedContrast | None:
    """Return the difference of the fine-tuned model from the model before training, paired by image.

    None if a score was not measured.
    """
    base_group = group_before_training(group)
    pairs = [
        (run.groups.get(group, {}).get(metric), run.groups.get(base_group, {}).get(metric)) for run in experiment.scores
    ]
    if any(None in pair for pair in pairs):
        return None
    changes = [tuned - base for tuned, base in pairs]
    values = PairedValues(tuple(experiment.seeds), np.stack([change.sums for change in changes]), changes[0].counts)
    return contrast_with_reference([values])[0]


def group_before_training(group: str) -> str:
    """Return the group of the model before training that corresponds to a group of the fine-tuned model."""
    return f"base/{group.partition('/')[2]}"
