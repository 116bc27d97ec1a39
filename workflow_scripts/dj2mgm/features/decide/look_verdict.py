"""The verdict of a look of `snakemake decide`, which compares two experiments with their seeds so far, and its page.

The page shows each look and the verdict; the console gets its sentences.
"""

from pathlib import Path

from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import InputError, pluralize
from dj2mgm.evaluation.contrast_verdicts import (
    REPORT_LOOK,
    DecisionCost,
    Look,
    compute_next_look,
    compute_verdict,
    find_cost_after_looks,
)
from dj2mgm.evaluation.contrasts import PairedContrast, contrast_with_reference
from dj2mgm.evaluation.run_scores import estimate_difference, pair_values
from dj2mgm.features.decide.decide_keys import DecideSection
from dj2mgm.features.decide.looks import LookRecord, count_affordable_seeds, count_planned_seeds
from dj2mgm.records import VERDICT_FILE, PageSettings
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.comparison import (
    HeadlineScore,
    find_headline,
    format_difference,
    format_interval,
    select_comparable_scores,
)
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.reporting.variants_page import CountCell, IntervalMark, ScoreCell, VariantRow, VariantsPage
from dj2mgm.reporting.verdicts.decision_cost import UNDECIDABLE, describe_images, describe_seeds, state_cost
from dj2mgm.reporting.verdicts.headline_verdicts import HeadlineVerdict, describe_missing_score, find_unlearned
from dj2mgm.reporting.verdicts.learning_faults import LearningFault, list_training_faults
from dj2mgm.reporting.verdicts.verdict_cards import VerdictCard
from dj2mgm.reporting.verdicts.verdict_sentences import (
    EITHER_MAY_BE_BETTER,
    NO_MORE_RUNS,
    NOT_RECORDED,
    NOT_SURE,
    SURE,
    build_snakemake_command,
    explain_withheld,
    write_statement,
)
from dj2mgm.runs.pages import format_hours, sum_measured_seconds
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.settings.validation import load_settings
from dj2mgm.verdict_kinds import VerdictKind

NOTHING_EXCLUDED = "no possible difference is excluded yet"


def take_look(
    experiments: list[ExperimentResults],
    earlier_records: list[LookRecord],
    budget: DecisionBudget,
    reported: bool = False,
) -> LookRecord:
    """Return the look at the reference and an experiment after their seeds.

    Args:
        experiments: the reference and the experiment, with equal seeds.
        earlier_records: the looks after fewer seeds.
        budget: the budget of this look and of later looks.
        reported: whether a report with several of these seeds was made before this look. It counts as a look if this
            is the first one; later looks follow the first.

    Raises:
        InputError: the headline cannot be compared.
    """
    reference, experiment = experiments
    headline, seed_count = find_headline(experiments), len(experiment.seeds)
    contrast = _compute_contrast(reference, experiment, headline)
    seconds = sum_measured_seconds(run.stages for side in experiments for run in side.runs)
    seconds_per_seed = sum_measured_seconds(side.runs[-1].stages for side in experiments)
    last_record = earlier_records[-1] if earlier_records else None
    most_seeds = count_planned_seeds(budget, last_record, seed_count, seconds, seconds_per_seed)
    is_last = min(most_seeds, count_affordable_seeds(budget, seed_count, seconds, seconds_per_seed)) <= seed_count
    reported = earlier_records[0].reported if earlier_records else reported
    looks = [REPORT_LOOK] if reported else []
    looks += [Look(len(record.seeds), record.most_seeds, record.level, record.spent) for record in earlier_records]
    look = compute_next_look(looks, seed_count, most_seeds, is_last)
    unlearned = find_unlearned(experiments, headline)
    if unlearned:
        kind = _choose_kind_without_learning(experiments, is_last)
    else:
        kind = compute_verdict(contrast, look.level, headline.margin, headline.lower_is_better)
    command = next_step = ""
    if kind == VerdictKind.WITHHELD:
        next_step = " ".join(dict.fromkeys(f"{fault.remedy}." for faults in unlearned.values() for fault in faults))
    elif kind == VerdictKind.UNDECIDED and is_last:
        next_step, more = _describe_cost(
            find_cost_after_looks(contrast, [*looks, look], headline.margin), seconds_per_seed
        )
        command = _build_budget_command(experiment, reference, budget, more, seconds, seconds_per_seed) if more else ""
    return LookRecord(
        experiment=experiment.name,
        against=reference.name,
        seeds=experiment.seeds,
        kind=kind.value,
        mean=float(contrast.mean),
        half=float(contrast.compute_half_width(look.level)),
        level=look.level,
        spent=look.spent,
        reported=reported,
        budget=budget,
        most_seeds=most_seeds,
        seconds=seconds,
        seconds_per_seed=seconds_per_seed,
        title=headline.title,
        difference=format_difference(headline.metric, float(contrast.mean)),
        interval=_format_ends(contrast, headline, look.level),
        statement=_write_statement(kind, experiments, headline, unlearned),
        next_step=next_step,
        command=command,
    )


def was_reported(experiments: list[ExperimentResults], folder: Path) -> bool:
    """Return whether a finished report compares the experiment and its reference with several of their seeds.

    Args:
        experiments: the reference and the experiment.
        folder: the experiment's folder of results. Its page is there, or next to it for all compared experiments.
    """
    for page in (folder / "report", folder.parent / "report"):
        if not (page / VERDICT_FILE).is_file() or not (page / "config.yaml").is_file():
            continue
        shown = {entry.name: entry for entry in load_settings(PageSettings, page / "config.yaml").experiments}
        sides = [{run.seed for run in shown[side.name].runs} for side in experiments if side.name in shown]
        if len(sides) == len(experiments) and len(set(experiments[1].seeds).intersection(*sides)) > 1:
            return True
    return False


def _choose_kind_without_learning(experiments: list[ExperimentResults], is_last: bool) -> VerdictKind:
    """Return the verdict if a model learned nothing.

    More seeds may show that the models use their images, but not that they were trained for long enough.
    """
    is_final = is_last or any(map(list_training_faults, experiments))
    return VerdictKind.WITHHELD if is_final else VerdictKind.UNDECIDED


def _compute_contrast(
    reference: ExperimentResults, experiment: ExperimentResults, headline: HeadlineScore
) -> PairedContrast:
    key = headline.group, headline.metric
    values = pair_values(*select_comparable_scores(experiment, reference)).get(key)
    if values is None:
        raise InputError(f"decide: {describe_missing_score(headline, experiment, reference)}")
    [contrast] = contrast_with_reference([values])
    if contrast.images < 2:
        raise InputError("decide: one held-out image decides nothing; hold out more images")
    return contrast


def _format_ends(contrast: PairedContrast, headline: HeadlineScore, level: float) -> str:
    """Return the ends of the interval; empty if it contains all possible differences."""
    estimate = estimate_difference(contrast, headline.group, headline.metric, level)
    low, high = estimate.ends
    mean, half_width = float(contrast.mean), float(contrast.compute_half_width(level))
    if mean - half_width < low and high < mean + half_width:  # both ends are the ends of the score's range
        return ""
    return format_interval(headline.metric, estimate, format_difference)


def _write_statement(
    kind: VerdictKind,
    experiments: list[ExperimentResults],
    headline: HeadlineScore,
    unlearned: dict[str, list[LearningFault]],
) -> str:
    """Return the verdict as the end of a sentence, without its period."""
    if kind == VerdictKind.WITHHELD:
        reasons = ". ".join(dict.fromkeys(fault.reason for faults in unlearned.values() for fault in faults))
        return f"{explain_withheld(unlearned)}. {reasons}"
    hint = ""
    if unlearned:
        verb, pronoun = ("is", "its") if len(unlearned) == 1 else ("are", "their")
        hint = f" ({join_words([*unlearned])} {verb} not yet shown to use {pronoun} images)"
    reference, experiment = experiments
    return "".join(write_statement(kind, [experiment, reference], headline, hint))


def _describe_cost(cost: DecisionCost, seconds_per_seed: float | None) -> tuple[str, int]:
    """Return the cost of a decision as a sentence, and the number of additional seeds in it."""
    images = describe_images(cost.images) if cost.images else ""
    if more := cost.seeds:
        options = describe_seeds(more, seconds_per_seed)
        options += f" or a new decision with {images}" if images else ""
    elif cost.both:
        more, added = cost.both
        options = f"a new decision with {describe_images(added)} and {more} more seeds"
        more = 0  # other images need a new decision with its own looks
    elif images:
        options = f"a new decision with {images}"
    else:
        return UNDECIDABLE, 0
    return state_cost(options, images_only=not (cost.seeds or cost.both)), more or 0


def _build_budget_command(
    experiment: ExperimentResults,
    reference: ExperimentResults,
    budget: DecisionBudget,
    more: int,
    seconds: float | None,
    seconds_per_seed: float | None,
) -> str:
    """Return the command that continues a decision with a budget of `more` additional seeds.

    Args:
        experiment: the experiment with its finished seeds.
        reference: the experiment that it is compared with.
        budget: the spent budget.
        more: number of additional seeds.
        seconds: time of the finished seeds; None if unknown.
        seconds_per_seed: time of one more seed; None if unknown.
    """
    limit = f"seeds: {max(budget.seeds, len(experiment.seeds) + more)}"
    if budget.hours is not None and seconds is not None and seconds_per_seed is not None:
        hours = 1.05 * (seconds + more * seconds_per_seed) / 3600  # seeds do not all take the same time
        limit += f", hours: {format_hours(hours)}"
    if [reference.name] != DecideSection().against:
        limit = f"against: [{reference.name}], {limit}"
    return build_snakemake_command(experiment, "decide", experiment=experiment.name, decide=f"{{{limit}}}")


def describe_decision(look: LookRecord, budget: DecisionBudget) -> str:
    """Return the verdict, its certainty and its cost as one sentence, followed by the next step."""
    return " ".join(filter(None, [describe_look(look, budget), look.next_step]))


def describe_conclusion(looks: list[LookRecord]) -> str:
    """Return whether an experiment is better than all opponents, from the last look at each.

    No correction for the number of opponents is needed, because each of them must be decided (intersection-union test,
    Berger 1982, Technometrics 24).
    """
    better = [look.against for look in looks if look.verdict == VerdictKind.BETTER]
    if len(better) == len(looks):
        return f"Conclusion: {looks[0].experiment} is better than {join_words(better)}."
    others = [f"{look.against} ({look.verdict.label.lower()})" for look in looks if look.against not in better]
    shown = f"better than {join_words(better)}, but " if better else ""
    return f"Conclusion: {looks[0].experiment} is {shown}not shown to be better than {join_words(others)}."


def describe_look(look: LookRecord, budget: DecisionBudget) -> str:
    """Return the verdict and its interval in a sentence."""
    spent = f"{len(look.seeds)} of at most {budget.seeds} seeds"
    if budget.hours is not None and look.seconds is not None:
        spent += f" and {format_hours(look.seconds / 3600)} of at most {budget.hours:g} hours"
    interval = f"95 % interval {look.interval}, corrected for all looks" if look.interval else NOTHING_EXCLUDED
    measurement = "" if look.verdict == VerdictKind.WITHHELD else f" ({look.difference}; {interval})"
    return f"After {spent}, {look.statement}{measurement}."


def build_decision_record(look: LookRecord, budget: DecisionBudget) -> dict[str, str]:
    """Return the decision after the last look as other pages show it."""
    label = look.verdict.label
    return {
        "verdict": f"{label} after {pluralize(len(look.seeds), 'seed')}",
        "statement": describe_decision(look, budget),
    }


def build_decision_card(look: LookRecord, budget: DecisionBudget) -> VerdictCard:
    """Return the first screen of a decision's page: the verdict after the last look, its cost and the next step."""
    confidence, certainty = _describe_certainty(look)
    kind = look.verdict
    verdict = HeadlineVerdict(look.experiment, "", kind, describe_look(look, budget), certainty=certainty)
    step = look.next_step or (f"{NO_MORE_RUNS}." if kind.is_decided else "")
    return VerdictCard(verdict, kind.label, kind.tone, confidence, describe_look_cost(look), step, look.command)


def describe_look_cost(look: LookRecord) -> str:
    """Return the time of all seeds of a look."""
    if look.seconds is None:
        return NOT_RECORDED
    return f"{format_duration(look.seconds)} for the seeds of both sides."


def _describe_certainty(look: LookRecord) -> tuple[str, str]:
    """Return how sure the verdict after a look is, in a few words and in a sentence."""
    kind = look.verdict
    if kind.is_decided:
        return SURE, (
            "All intervals together contain the true difference with a probability of 95 %, even though the difference "
            "was tested after each seed."
        )
    if kind == VerdictKind.UNDECIDED and not look.interval:
        return NOT_SURE, (
            f"With {pluralize(len(look.seeds), 'seed')}, so little is known about the noise between seeds that "
            f"{NOTHING_EXCLUDED}. Later looks have much shorter intervals."
        )
    if kind == VerdictKind.UNDECIDED and abs(look.mean) <= look.half:
        return NOT_SURE, EITHER_MAY_BE_BETTER
    return "", ""


def build_decision_page(looks: list[LookRecord], budget: DecisionBudget) -> VariantsPage:
    """Return the page of a decision, with a row per look."""
    last = looks[-1]
    end = 1.05 * max(min(abs(look.mean) + look.half, 4 * (abs(last.mean) + last.half)) for look in looks) or 1.0
    scale = Scale(-end, end)
    return VariantsPage(
        f"Decision between {last.experiment} and {last.against}",
        [
            f"Each row is a look at the difference from {last.against}, paired by seed and image. The intervals are "
            "longer than those of a single look. All of them together contain the true difference with a probability "
            "of 95 %. The first ones are long even if seeds agree, because two or three seeds tell little about the "
            "noise between seeds. A dashed interval goes beyond its axis.",
        ],
        "Seeds",
        ["Confidence of the interval", "Time of all seeds"],
        [(f"Difference: {last.title}", "")],
        [_build_row(look, scale) for look in looks],
        cards=[build_decision_card(last, budget)],
        zero_line=True,
    )


def _build_row(look: LookRecord, scale: Scale) -> VariantRow:
    low, mean, high = (scale.locate(value) for value in (look.mean - look.half, look.mean, look.mean + look.half))
    time = "–" if look.seconds is None else format_duration(look.seconds)
    counts = [CountCell(f"{100 * (1 - look.level):.4g} %"), CountCell(time)]
    css_class = look.verdict.css_class
    interval = look.interval or NOTHING_EXCLUDED
    text = f"{look.kind}: {look.difference}, interval: {interval}"
    score = ScoreCell(look.difference, [interval, look.kind], css_class, IntervalMark(mean, low, high), text)
    return VariantRow(str(len(look.seeds)), counts, [score], "seeds " + ", ".join(map(str, look.seeds)))
