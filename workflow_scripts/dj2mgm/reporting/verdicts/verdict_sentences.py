"""Sentences that several pages with verdicts share."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dj2mgm.reporting.comparison import HeadlineScore, format_difference, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.verdict_kinds import VerdictKind

SURE, NOT_SURE = "95 % confidence.", "Not sure."
EITHER_MAY_BE_BETTER = "The interval contains zero, so either side may be better."
NO_MORE_RUNS = "The verdict needs no more runs"  # the rest of the sentence follows
ADVICE_TO_KEEP = "This command makes it an experiment of its own:"
NOT_RECORDED = "Not recorded."  # of times


class Statement(NamedTuple):
    """A sentence, or a part of a sentence, whose second part is emphasized."""

    lead: str
    emphasis: str
    rest: str


def write_statement(
    kind: VerdictKind, sides: Sequence[ExperimentResults], headline: HeadlineScore, hint: str = ""
) -> Statement:
    """Return a verdict and its scores as a part of a sentence.

    The scores are means over the seeds that both sides have, as the difference is.

    Args:
        kind: a verdict on a measured comparison.
        sides: the experiment and the reference.
        headline: the score that decides.
        hint: a remark on an undecided verdict, with a leading space.
    """
    experiment, reference = (side.name for side in sides)
    shared_seeds = [seed for seed in sides[0].seeds if seed in sides[1].seeds]
    groups = [side.select_seeds(shared_seeds).groups[headline.group] for side in sides]
    scores = [format_score(headline.metric, estimates[headline.metric].mean) for estimates in groups]
    if kind == VerdictKind.EQUIVALENT:
        margin = format_difference(headline.metric, headline.margin).lstrip("+")
        rest = f" within the margin of {margin}: {headline.title} {' and '.join(scores)}"
        return Statement(f"{experiment} and {reference} are ", kind, rest)
    if kind == VerdictKind.UNDECIDED:
        question = f" whether {experiment} is better than {reference}{hint}"
        return Statement("it is ", kind, f"{question}: {headline.title} {' compared with '.join(scores)}")
    rest = f" than {reference}: {headline.title} {' instead of '.join(scores)}"
    return Statement(f"{experiment} is ", kind, rest)


def explain_withheld(unlearned: Collection[str], verdicts: int = 1) -> str:
    """Return why a number of verdicts are withheld, as a part of a sentence.

    Args:
        unlearned: names of the experiments that learned nothing.
        verdicts: number of withheld verdicts.
    """
    subject = "the verdict is" if verdicts == 1 else "the verdicts are"
    return f"{subject} withheld, because {join_words([*unlearned])} learned nothing"


def capitalize(text: str) -> str:
    """Return the part of a sentence with a capital letter at its beginning."""
    return text[0].upper() + text[1:]
