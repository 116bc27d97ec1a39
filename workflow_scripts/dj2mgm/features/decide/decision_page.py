"""The page of `snakemake decide`, which shows each look and the verdict, and its sentences for the console."""

from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import pluralize
from dj2mgm.features.decide.looks import LookRecord
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.rendering import join_words
from dj2mgm.reporting.variants_page import CountCell, IntervalMark, ScoreCell, VariantRow, VariantsPage
from dj2mgm.reporting.verdicts.headline_verdicts import HeadlineVerdict
from dj2mgm.reporting.verdicts.verdict_cards import VerdictCard
from dj2mgm.reporting.verdicts.verdict_sentences import (
    EITHER_MAY_BE_BETTER,
    NO_MORE_RUNS,
    NOT_RECORDED,
    NOT_SURE,
    SURE,
)
from dj2mgm.runs.pages import format_hours
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.verdict_kinds import VerdictKind

NOTHING_EXCLUDED = "no possible difference is excluded yet"


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
