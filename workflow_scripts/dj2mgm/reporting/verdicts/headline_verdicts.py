"""The verdict on each experiment by the headline score: how sure it is, what it cost, and what would decide it."""

from dataclasses import dataclass
from functools import partial

from dj2mgm.evaluation.contrast_verdicts import ContrastVerdict, decide
from dj2mgm.evaluation.contrasts import PairedContrast, contrast_with_reference
from dj2mgm.evaluation.groups import find_score_range
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import estimate_difference, pair_values
from dj2mgm.reporting.comparison import (
    SCORE_TITLES,
    HeadlineScore,
    describe_obstacles,
    find_obstacle,
    format_difference,
    format_interval,
    format_score,
    select_comparable_scores,
)
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.verdicts.decision_cost import (
    ExperimentPair,
    advise_next_step,
    find_comparisons,
    find_controls,
    is_learning_rate_control,
)
from dj2mgm.reporting.verdicts.learning_faults import (
    LearningFault,
    TrainingChange,
    estimate_image_gain,
    find_learning_faults,
)
from dj2mgm.reporting.verdicts.verdict_sentences import (
    EITHER_MAY_BE_BETTER,
    Statement,
    capitalize,
    explain_withheld,
    write_statement,
)
from dj2mgm.score_groups import FINETUNED, OWN_GROUP, SHUFFLED, name_group
from dj2mgm.verdict_kinds import VerdictKind


@dataclass(frozen=True)
class HeadlineVerdict:
    """Verdict on one comparison, shown under the name of its subject."""

    experiment: str
    description: str
    kind: VerdictKind = VerdictKind.NONE
    lead: str = ""  # statement in three parts; the second part is emphasized
    emphasis: str = ""
    rest: str = ""
    certainty: str = ""
    next_step: str = ""
    command: str = ""

    @property
    def statement(self) -> str:
        return f"{self.lead}{self.emphasis}{self.rest}"


def build_headline_verdicts(
    experiments: list[ExperimentResults],
    headline: HeadlineScore,
    unlearned: dict[str, list[LearningFault]],
    target: str = "",
) -> list[HeadlineVerdict]:
    """Return the verdicts on all comparisons of a page.

    Args:
        experiments: the reference, and the others.
        headline: the score that decides.
        unlearned: signs that models have learned nothing, by experiment.
        target: Snakemake target of a page of variants; empty for a page of experiments, which are targets.
    """
    comparisons = find_comparisons(experiments)
    key = headline.group, headline.metric
    contrasts, pooled_experiments = _compute_contrasts(comparisons, experiments, key)
    decisions = decide(list(contrasts.values()), headline.margin, headline.lower_is_better)
    contrast_verdicts = dict(zip(contrasts, decisions, strict=True))
    verdicts: list[HeadlineVerdict] = []
    for number, comparison in enumerate(comparisons):
        experiment, reference, subject = comparison.experiment, comparison.reference, comparison.subject
        if names := [name for name in (experiment.name, reference.name) if name in unlearned]:
            verdicts.append(_give_no_verdict(subject, f"{capitalize(explain_withheld(names))}."))
            continue
        if number not in contrasts:
            verdicts.append(_give_no_verdict(subject, describe_missing_score(headline, experiment, reference)))
            continue
        contrast, contrast_verdict = contrasts[number], contrast_verdicts[number]
        kind = contrast_verdict.kind
        beginning = ""
        if is_learning_rate_control(subject):
            kinds = {verdict.experiment: verdict.kind for verdict in verdicts}
            beginning = describe_repetition(kinds.get(subject.control.experiment, VerdictKind.NONE), kind)
        difference = estimate_difference(contrast, *key)
        sentence = _write_sentence(kind, [experiment, reference], headline, difference, beginning)
        controls = [] if target else find_controls(experiments, comparison)
        step, command = advise_next_step(contrast_verdict, contrast, headline.margin, comparison, controls, target)
        verdicts.append(
            HeadlineVerdict(
                experiment=subject.name,
                description=subject.description,
                kind=kind,
                lead=sentence.lead,
                emphasis=sentence.emphasis,
                rest=sentence.rest,
                certainty=_describe_certainty(
                    contrast_verdict, contrast, headline, len(contrasts), pooled_experiments[number]
                ),
                next_step=step,
                command=command,
            )
        )
    return verdicts


def describe_repetition(kind: VerdictKind, repeated_kind: VerdictKind) -> str:
    """Return the beginning of a statement at half of the learning rates: whether the verdict is the same."""
    if kind == VerdictKind.NONE:
        return "At half of the learning rates, "
    outcome = "is the same" if kind == repeated_kind else f"changes (no longer “{kind}”)"
    return f"At half of the learning rates, the verdict {outcome}: "


def _compute_contrasts(
    comparisons: list[ExperimentPair], experiments: list[ExperimentResults], key: tuple[str, str]
) -> tuple[dict[int, PairedContrast], dict[int, int]]:
    """Return each measured comparison's contrast, and the number of experiments that its seed noise is estimated from.

    Keys are indices of `comparisons`. All experiments of the page with as many seeds count for the noise, as in tables.
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
                contrasts[number] = contrast = by_name[comparison.experiment.name]
                pooled_experiments[number] = sum(len(value.seeds) == contrast.seeds for value in values.values())
    return dict(sorted(contrasts.items())), pooled_experiments


def find_unlearned(experiments: list[ExperimentResults], headline: HeadlineScore) -> dict[str, list[LearningFault]]:
    """Return the signs that models have learned nothing, by experiment; only experiments with such signs."""
    title = SCORE_TITLES[headline.metric]
    faults_by_name = {
        experiment.name: find_learning_faults(experiment, headline.metric, title) for experiment in experiments
    }
    return {name: faults for name, faults in faults_by_name.items() if faults}


def _write_sentence(
    kind: VerdictKind,
    sides: list[ExperimentResults],
    headline: HeadlineScore,
    difference: Estimate,
    beginning: str = "",
) -> Statement:
    """Return the sentence of a verdict.

    `beginning` is the beginning of the sentence if the verdict repeats another verdict.
    """
    start = beginning
    if difference.seeds == 1:
        start += ("for" if beginning else "For") + " these two models, "
    statement = write_statement(kind, sides, headline)
    lead = statement.lead
    if kind == VerdictKind.UNDECIDED and not start:
        lead = capitalize(lead)
    rest = f"{statement.rest} ({_describe_difference(headline.metric, difference)})."
    return Statement(f"{start}{lead}", statement.emphasis, rest)


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
    qualifier = "the corrected" if comparisons > 1 else "the"
    corrected = f" (corrected for {comparisons} comparisons)" if comparisons > 1 else ""
    seeds = f"{contrast.seeds} seeds" if contrast.seeds > 1 else "one seed"
    sample = f"{format_integer(contrast.images)} images and {seeds}"
    kind = contrast_verdict.kind
    if kind == VerdictKind.UNDECIDED and contrast_verdict.detectable is None:
        return "At least two images are needed."
    low, high = find_score_range(headline.metric)
    if kind == VerdictKind.UNDECIDED and not contrast_verdict.detectable[0] < high - low:
        text = (
            f"With {sample}, more than one of five comparisons would miss the largest possible difference{corrected}."
        )
    elif kind == VerdictKind.UNDECIDED:
        change, least, most = (
            format_difference(headline.metric, value).lstrip("+") for value in contrast_verdict.detectable
        )
        text = f"With {sample}, four of five comparisons would find a true difference of {change}{corrected}."
        if not contrast_verdict.detectable[2] < high - low:
            text += f" This is an estimate; it may be {least}, or more than the largest possible one (80 % interval)."
        elif least != most:
            text += f" This is an estimate; it may be {least.removesuffix(' points')} to {most} (80 % interval)."
    elif kind == VerdictKind.EQUIVALENT:
        text = f"Measured with {sample}."
    else:
        share = "less than 0.1" if contrast_verdict.p_value < 0.001 else f"{100 * contrast_verdict.p_value:.2g}"
        if contrast.seeds == 1:
            sides, studies = "models", f"samples of {format_integer(contrast.images)} images"
        else:
            sides, studies = "data", f"repetitions with {sample}"
        text = f"Equally good {sides} would differ by this much or more in {share} % of "
        text += f"{studies}{corrected}."
    if kind == VerdictKind.UNDECIDED and abs(contrast.mean) <= contrast.compute_half_width():
        text = f"{EITHER_MAY_BE_BETTER} {text}"
    elif kind == VerdictKind.UNDECIDED:
        text += f" The interval excludes zero, but {qualifier} p-value is {contrast_verdict.p_value:.2g}."
    if contrast.seeds == 1:
        text += " One seed does not show how much the scores would change with another seed."
    elif pooled_experiments > 1:
        text += f" The noise between seeds is estimated from all experiments of the page with {seeds}."
        text += " The seeds of this experiment vary more, so its own noise counts." if contrast.noisy else ""
    return text


def _give_no_verdict(experiment: ExperimentResults, reason: str) -> HeadlineVerdict:
    return HeadlineVerdict(experiment.name, experiment.description, lead=reason)


def describe_missing_score(headline: HeadlineScore, experiment: ExperimentResults, reference: ExperimentResults) -> str:
    """Return why two experiments cannot be compared by the headline."""
    if find_obstacle(headline.metric, experiment, reference):
        return " ".join(["There is no verdict.", *describe_obstacles(experiment, reference)])
    names = [
        side.name for side in (experiment, reference) if headline.metric not in side.groups.get(headline.group, {})
    ]
    return _describe_unmeasured(headline, names)


def _describe_unmeasured(headline: HeadlineScore, names: list[str]) -> str:
    experiments = "experiment" if len(names) == 1 else "experiments"
    return (
        f"There is no verdict: the {headline.title} of {' and '.join(names)} was not measured. Results of an earlier "
        f"version do not contain it. Run the {experiments} again, or choose another report.headline."
    )


def judge_single(
    experiment: ExperimentResults, headline: HeadlineScore, changes: dict[tuple[str, str], TrainingChange]
) -> HeadlineVerdict:
    """Return the verdict on a single experiment, with the changes of its scores by training.

    Its score with its own images is compared with its score with shuffled images and with the score before training.
    """
    groups, metric = experiment.groups, headline.metric
    own_estimate, gain = groups.get(OWN_GROUP, {}).get(metric), estimate_image_gain(experiment, metric)
    if own_estimate is None or gain is None:
        return _give_no_verdict(experiment, _describe_unmeasured(headline, [experiment.name]))
    title, show = SCORE_TITLES[metric], partial(format_score, metric)
    shuffled = show(groups[name_group(FINETUNED, SHUFFLED)][metric].mean)
    uses_images = gain.is_above_zero
    measurement = (
        f"{title} {show(own_estimate.mean)} instead of {shuffled} with shuffled images "
        f"({_describe_difference(metric, gain)})"
    )
    emphasis, kind = "is not shown to use its images", VerdictKind.UNDECIDED
    if uses_images:
        emphasis, kind = "uses its images", VerdictKind.BETTER
    rest = f": {measurement}."
    if training := changes.get((OWN_GROUP, metric)):
        base = training.base
        change = f"({training.difference}; 95 % interval {training.interval})"
        rest = f": {measurement}, compared with {base} before training {change}."
        if training.kind == "worse":
            emphasis, kind = "is worse than before training", VerdictKind.WORSE
            rest = f": {title} {show(own_estimate.mean)} instead of {base} {change}."
        elif uses_images:
            relation = "is better than" if training.kind == "better" else "is not shown to differ from"
            rest = f", and {relation} before training{rest}"
    seeds = "one seed" if own_estimate.seeds == 1 else f"{own_estimate.seeds} seeds"
    certainty = f"Measured on {format_integer(own_estimate.images)} held-out images with {seeds}."
    if training:
        certainty += " The change by training is judged by its p-value, corrected for the number of measured scores."
    return HeadlineVerdict(
        experiment.name, experiment.description, kind, "The fine-tuned model ", emphasis, rest, certainty
    )


def _describe_difference(metric: str, difference: Estimate) -> str:
    interval = format_interval(metric, difference, format_difference)
    return f"{format_difference(metric, difference.mean)}; 95 % interval {interval}"
