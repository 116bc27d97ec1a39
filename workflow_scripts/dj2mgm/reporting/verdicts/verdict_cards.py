"""The first screen of a page: each verdict with its certainty, its cost, and the next step with its command."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from dj2mgm.cli.messages import format_duration
from dj2mgm.evaluation.run_scores import GroupEstimates, estimate_difference
from dj2mgm.reporting.comparison import SCORE_TITLES, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.reporting.verdicts.decision_cost import (
    ExperimentPair,
    find_comparisons,
    find_controls,
    is_learning_rate_control,
)
from dj2mgm.reporting.verdicts.headline_panels import summarize_differences
from dj2mgm.reporting.verdicts.headline_verdicts import HeadlineVerdict
from dj2mgm.reporting.verdicts.learning_faults import (
    MIN_STEPS,
    LearningFault,
    advise_other_model,
    compute_change_by_training,
)
from dj2mgm.reporting.verdicts.verdict_sentences import (
    ADVICE_TO_KEEP,
    NO_MORE_RUNS,
    NOT_RECORDED,
    NOT_SURE,
    SURE,
    build_keep_command,
    build_snakemake_command,
    capitalize,
    explain_withheld,
)
from dj2mgm.runs.experiments import can_select_rows
from dj2mgm.runs.pages import sum_seconds
from dj2mgm.score_groups import OWN, OWN_GROUP, PRETRAINED, name_group
from dj2mgm.settings.configuration import ExperimentOnlyKeys
from dj2mgm.settings.models import PHOTO_MODEL
from dj2mgm.verdict_kinds import VerdictKind

CAPTION_SCORES = ("attribute_accuracy", "clip_score", "ref_clip_score")
# after scores that fell, although the verdict is better
LOSS_ADVICE = "First decide whether the scores that fell matter for your use of the model."
CAPTION_LOSS_ADVICE = (
    "This matters only if you need captions; then add rows to the instructions whose question asks for one."
)
LONGER_TRAINING_FACTOR = 3  # after a training that taught nothing, advise this multiple of its steps or of MIN_STEPS


@dataclass(frozen=True)
class Remedy:
    """Advice about a model that learned nothing, and settings of the advised command."""

    advice: str
    settings: tuple[tuple[str, str], ...]

    def build_command(self, reference: ExperimentResults, target: str) -> str:
        """Return the command, or an empty string if there is none; the advised model is fetched first."""
        settings = dict(self.settings)
        if not settings:
            return ""
        fetch = f"snakemake fetch --config model={PHOTO_MODEL} && " if "model" in settings else ""
        return fetch + build_snakemake_command(reference, target, **settings)


@dataclass(frozen=True)
class WithheldComparison:
    """A comparison without a verdict, because one or both of its models learned nothing."""

    comparison: ExperimentPair
    unlearned: tuple[str, ...]  # names of its experiments that learned nothing
    remedy: Remedy  # for the first of them


@dataclass(frozen=True)
class VerdictCard:
    """Statements of the first screen about one experiment."""

    verdict: HeadlineVerdict
    label: str  # verdict in one or two words
    tone: str  # good, bad or same
    confidence: str  # how sure the verdict is, in a few words; empty if that is not known
    cost: str
    next_step: str
    command: str
    withheld: WithheldComparison | None = None
    fallen: str = ""  # sentence on scores that are worse, although the verdict is better
    control: str = ""  # command that adds a random subset as control; empty if the experiment needs none


def write_verdict_cards(
    experiments: list[ExperimentResults],
    verdicts: list[HeadlineVerdict],
    unlearned: dict[str, list[LearningFault]],
    forgotten: Collection[str],
    differences: dict[str, GroupEstimates],
    study: Path | None = None,
) -> list[VerdictCard]:
    """Return a card on each later experiment, or on the first one if it is alone.

    Args:
        experiments: the reference, and the others.
        verdicts: the verdicts on their comparisons.
        unlearned: signs that models have learned nothing, by experiment.
        forgotten: names of experiments of which training made scores worse.
        differences: differences of all scores from the first experiment; none on a page of variants.
        study: folder of a page of variants, of the name of its Snakemake target; None for a page of experiments, which
            are targets.
    """
    target = study.name if study else ""
    first_experiment, *later_experiments = experiments
    comparisons = find_comparisons(experiments) or [
        ExperimentPair(first_experiment, first_experiment, first_experiment)
    ]
    cards: list[VerdictCard] = []
    for verdict, comparison in zip(verdicts, comparisons, strict=True):
        experiment, reference, subject = comparison.experiment, comparison.reference, comparison.subject
        withheld = _find_withheld(comparison, unlearned)
        seeds = len({*experiment.seeds} & {*reference.seeds})  # of the paired difference
        label, tone = _choose_label(verdict, bool(later_experiments), bool(withheld), seeds)
        if subject is not experiment:  # a control's entry shows the verdict on the experiment that it controls
            label = f"{experiment.name}: {label[0].lower()}{label[1:]}"
        if withheld:
            remedy = withheld.remedy
            step, command = remedy.advice, remedy.build_command(first_experiment, target or withheld.unlearned[0])
        elif verdict.next_step:
            step, command = verdict.next_step, verdict.command
        elif study:
            step, command = _choose_variant(verdict, comparison), ""
            if verdict.kind == VerdictKind.BETTER and experiment.changes:
                step, command = f"{step} {ADVICE_TO_KEEP}", build_keep_command(experiment, study)
        else:
            kinds = {card.verdict.experiment: card.verdict.kind for card in cards}
            step, command = _advise_next_step(verdict, comparison, kinds, experiment.name in forgotten)
        fallen = control = ""
        if not target and verdict.kind == VerdictKind.BETTER and subject is experiment:
            has_reference = bool(later_experiments)
            fallen = (
                _describe_fallen(differences.get(experiment.name, {}))
                if has_reference
                else _describe_lost_captions(experiment)
            )
        if not target and verdict.kind != VerdictKind.NONE:
            control = _build_control_command(comparison, experiments)
        if fallen:
            label = f"{label}, {'some scores got worse' if later_experiments else 'but captions fell'}"
            if later_experiments:
                tone = VerdictKind.UNDECIDED.tone
                step = f"{LOSS_ADVICE} {step}".strip()
        confidence = "" if withheld else _describe_confidence(verdict, seeds, bool(later_experiments))
        cards.append(
            VerdictCard(
                verdict,
                label,
                tone,
                confidence,
                _describe_cost([subject, reference], first_experiment),
                step,
                command,
                withheld,
                fallen,
                control,
            )
        )
    return cards


def _describe_lost_captions(experiment: ExperimentResults) -> str:
    """Return a sentence on scores of captions that fell from stage 1 to fine-tuning; empty if none did."""
    lost = []
    for metric in CAPTION_SCORES:
        contrast = compute_change_by_training(experiment, OWN_GROUP, metric, PRETRAINED)
        if contrast is None or contrast.images < 2:
            continue
        change = estimate_difference(contrast, OWN_GROUP, metric)
        if change.ends[1] < 0:
            after, before = (
                experiment.groups[group][metric].mean for group in (OWN_GROUP, name_group(PRETRAINED, OWN))
            )
            scores = (format_score(metric, score) for score in (before, after))
            lost.append(f"{SCORE_TITLES[metric]} from {' to '.join(scores)}")
    if not lost:
        return ""
    return (
        f"Captions fell after stage 1, which trains only captions: {join_words(lost)} (95 % intervals exclude 0). "
        f"{CAPTION_LOSS_ADVICE}"
    )


def _describe_fallen(differences: GroupEstimates) -> str:
    """Return a sentence on the shown scores in which a better experiment is worse than the first; empty if none is."""
    worse = [f"{score} after {scores.stage}" for scores in summarize_differences(differences) for score in scores.worse]
    return f"Not all scores are better: {join_words(worse)}. The 95 % interval excludes 0." if worse else ""


def _build_control_command(comparison: ExperimentPair, experiments: list[ExperimentResults]) -> str:
    """Return the command that adds a random subset to an experiment that selects rows and has no such control."""
    experiment, reference = comparison.experiment, comparison.reference
    controls = find_controls(experiments, comparison)
    recipes = [dict(side.recipes) for side in (experiment, reference)]
    counts = [[file.rows_in for file in side.runs[0].jsonl.files.values()] for side in (experiment, reference)]
    if (
        not comparison.can_be_decided
        or "random" in controls
        or experiment.dataset != reference.dataset
        or not can_select_rows(*recipes)
        or not any(own < other for own, other in zip(*counts, strict=True))
    ):
        return ""
    settings = {"controls": f"[{','.join([*controls, 'random'])}]"}
    if experiment.seeds != ExperimentOnlyKeys.model_fields["seeds"].default:
        settings["seeds"] = f"[{','.join(map(str, experiment.seeds))}]"
    return build_snakemake_command(reference, experiment.name, **settings)


def merge_withheld(cards: list[VerdictCard], reference: ExperimentResults, target: str = "") -> list[VerdictCard]:
    """Return the cards, with one for all comparisons of models that learned nothing and have the same remedy.

    Args:
        cards: cards of a page.
        reference: first experiment of the page.
        target: Snakemake target of a page of variants; empty for a page of experiments, which are targets.
    """
    groups: dict[Remedy | str, list[VerdictCard]] = {}
    for card in cards:
        groups.setdefault(card.withheld.remedy if card.withheld else card.verdict.experiment, []).append(card)
    return [_merge_cards(group, reference, target) if len(group) > 1 else group[0] for group in groups.values()]


def _merge_cards(cards: list[VerdictCard], reference: ExperimentResults, target: str) -> VerdictCard:
    """Return one card for experiments whose verdicts are withheld for the same reason."""
    verdicts = [card.verdict for card in cards]
    withheld = [card.withheld for card in cards if card.withheld]
    unlearned = list(dict.fromkeys(name for reason in withheld for name in reason.unlearned))
    descriptions = [f"{verdict.experiment}: {verdict.description}" for verdict in verdicts if verdict.description]
    verdict = replace(
        verdicts[0],
        experiment=join_words([verdict.experiment for verdict in verdicts]),
        description=" ".join(descriptions),
        lead=f"{capitalize(explain_withheld(unlearned, len(cards)))}.",
    )
    sides = [side for reason in withheld for side in (reason.comparison.subject, reason.comparison.reference)]
    targets = dict.fromkeys(reason.unlearned[0] for reason in withheld)
    command = withheld[0].remedy.build_command(reference, target or " ".join(targets))
    cost = _describe_cost(sides, reference).replace("this experiment", "these experiments")
    return replace(cards[0], verdict=verdict, label=VerdictKind.WITHHELD.label, cost=cost, command=command)


def _find_withheld(comparison: ExperimentPair, unlearned: dict[str, list[LearningFault]]) -> WithheldComparison | None:
    """Return why a comparison has no verdict, or None if both models learned."""
    sides = {experiment.name: experiment for experiment in (comparison.experiment, comparison.reference)}
    names = tuple(name for name in sides if name in unlearned)
    if not names:
        return None
    remedy = _find_remedy(sides[names[0]], [fault for name in names for fault in unlearned[name]])
    return WithheldComparison(comparison, names, remedy)


def _choose_label(verdict: HeadlineVerdict, is_comparison: bool, is_withheld: bool, seeds: int) -> tuple[str, str]:
    kind = VerdictKind.WITHHELD if is_withheld else verdict.kind
    if kind in (VerdictKind.WITHHELD, VerdictKind.NONE):
        return kind.label, kind.tone
    label = kind.label if is_comparison else kind.learning_label
    return f"{label}, one seed" if is_comparison and seeds == 1 else label, kind.tone


def _describe_confidence(verdict: HeadlineVerdict, seeds: int, is_comparison: bool) -> str:
    """Return how sure a verdict is, in a few words."""
    if not verdict.kind.is_decided:
        return NOT_SURE if verdict.kind == VerdictKind.UNDECIDED else ""
    if seeds > 1:
        return SURE
    return (
        "95 % confidence about these two trained models, not about the data."
        if is_comparison
        else "95 % confidence for this model."
    )


def _describe_cost(experiments: list[ExperimentResults], reference: ExperimentResults) -> str:
    """Return the time of the stages that the experiments added to the reference's stages."""
    is_reference_only = all(experiment is reference for experiment in experiments)
    reference_folders = set() if is_reference_only else _list_folders(reference)
    seconds = sum_seconds(set().union(*map(_list_folders, experiments)) - reference_folders)
    if seconds is None:
        return NOT_RECORDED
    stages = "all stages" if is_reference_only else "the stages that this experiment added"
    return f"{format_duration(seconds)} for {stages}, their times added up."


def find_cost(experiment: ExperimentResults) -> float | None:
    """Return the seconds of all stages of an experiment; None if they are not recorded."""
    return sum_seconds(_list_folders(experiment))


def _list_folders(experiment: ExperimentResults) -> set[Path]:
    return {folder for run in experiment.runs for folder in run.stages.values()}


def _find_remedy(experiment: ExperimentResults, faults: list[LearningFault]) -> Remedy:
    """Return another model if the experiment's is too small for its data, or more steps of all training stages."""
    if other_model := advise_other_model(experiment):
        return Remedy(f"{other_model}. This command fits a 24 GB GPU:", (("model", PHOTO_MODEL),))
    steps = {stage: record.steps for stage, record in experiment.runs[0].records.items()}
    settings = {}
    for stage, number in steps.items():
        # max_steps overrides min_steps and epochs
        key = "max_steps" if getattr(experiment.config, stage).max_steps else "min_steps"
        settings[stage] = f"{{{key}: {LONGER_TRAINING_FACTOR * max(number, MIN_STEPS)}}}"
    advice = " ".join(dict.fromkeys(f"{fault.remedy}." for fault in faults))
    return Remedy(f"{advice} This command trains with more steps:" if settings else advice, tuple(settings.items()))


def _advise_less_training(experiment: ExperimentResults, reference: ExperimentResults) -> tuple[str, str]:
    """Return what to do with a model that forgot, and a command with half of the learning rate."""
    rate = f"{experiment.config.finetune.learning_rate / 2:g}"
    advice = "Train less, or mix general instructions into the data. This command trains with half the learning rate:"
    return advice, build_snakemake_command(reference, experiment.name, finetune=f"{{learning_rate: {rate}}}")


def _choose_variant(verdict: HeadlineVerdict, comparison: ExperimentPair) -> str:
    """Return which of two variants to use after a verdict."""
    experiment, reference = comparison.experiment.name, comparison.reference.name
    advice = {
        VerdictKind.BETTER: f"Use {experiment} instead of {reference}.",
        VerdictKind.WORSE: f"Keep {reference}.",
        VerdictKind.EQUIVALENT: f"Use the cheaper of {experiment} and {reference}.",
    }
    return advice.get(verdict.kind, "")


def _advise_next_step(
    verdict: HeadlineVerdict, comparison: ExperimentPair, kinds: dict[str, VerdictKind], forgot: bool
) -> tuple[str, str]:
    """Return what to do with a decided experiment, or with a model that is not compared.

    Args:
        verdict: the verdict.
        comparison: the two experiments.
        kinds: earlier verdicts of the page, by experiment.
        forgot: whether training made scores of the experiment worse.
    """
    experiment, reference, subject = comparison.experiment, comparison.reference, comparison.subject
    if experiment is reference:
        if verdict.kind == VerdictKind.BETTER:
            advice = "Compare with other data. This command rewrites captions that do not fit their images:"
            return advice, build_snakemake_command(reference, "dj_synth")
        if verdict.kind == VerdictKind.WORSE:
            return _advise_less_training(experiment, reference)
        return "", ""
    if is_learning_rate_control(subject):
        if verdict.kind == kinds.get(subject.control.experiment):
            return "The verdict holds at both learning rates.", ""
        advice = "First find good learning rates for both experiments; then compare the data."
        return f"The verdict depends on the learning rates. {advice}", ""
    if reference.control:
        advice = {
            VerdictKind.BETTER: f"The selected rows are better than as many random ones. {NO_MORE_RUNS}.",
            VerdictKind.WORSE: "Random rows are better. Change the selection.",
            VerdictKind.EQUIVALENT: "Random rows are as good. Change the selection, or leave it out.",
        }
        return advice.get(verdict.kind, ""), ""
    # the data are better, but the model lost scores that it had before training
    if verdict.kind == VerdictKind.BETTER and forgot:
        advice, command = _advise_less_training(experiment, reference)
        warning = f"{NO_MORE_RUNS}, but training made scores of {experiment.name} worse."
        return f"{warning} Before you publish: {advice[0].lower()}{advice[1:]}", command
    if verdict.kind == VerdictKind.BETTER:
        command = build_snakemake_command(reference, "publish", experiment=experiment.name)
        return f"{NO_MORE_RUNS}. To publish model and data:", command
    if verdict.kind in (VerdictKind.WORSE, VerdictKind.EQUIVALENT):
        return f"{NO_MORE_RUNS}. Keep the data of {reference.name}.", ""
    return "", ""
