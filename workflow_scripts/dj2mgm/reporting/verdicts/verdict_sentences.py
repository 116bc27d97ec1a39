"""Sentences and commands that several pages with verdicts share.

A command of Snakemake contains the settings that name its dataset and model.
"""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dj2mgm.records import ShownExperiment
from dj2mgm.reporting.comparison import HeadlineScore, format_difference, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_snakemake_command, join_words
from dj2mgm.settings.configuration import drop_defaults
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


def build_snakemake_command(experiment: ExperimentResults | ShownExperiment, target: str, /, **settings: str) -> str:
    """Return a command that continues with the results of an experiment.

    Args:
        experiment: an experiment whose folder has its own name, such as the reference of a page.
        target: target of Snakemake.
        settings: further settings of the command line, in YAML.
    """
    experiment_settings = drop_defaults({"dataset": experiment.config.dataset, "model": experiment.config.model.name})
    return format_snakemake_command(target, experiment_settings | settings)


def build_keep_command(variant: ExperimentResults, study: Path, suffix: str = "best") -> str:
    """Return the command that makes an experiment's file, named after the study with a suffix, of a variant.

    `study` is the folder of the study's page.
    """
    arguments = [f"{study}/config.yaml", variant.name, f"{study.name}_{suffix}"]
    return " ".join(["python workflow_scripts/keep_variant.py", *map(shlex.quote, arguments)])
