"""The models that judge captions: whether they have also selected or seen, and how far two of them agree."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from dj2mgm.evaluation.groups import SECOND
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.seeds import Estimates, Scores
from dj2mgm.reporting.comparable import JUDGED, differing_judges, judge_name
from dj2mgm.reporting.comparison import GROUP_LABELS, HEADLINES, NO_DIFFERENCE, gain, interval, scope, verdict
from dj2mgm.reporting.drawing import grouped, listed
from dj2mgm.reporting.experiment import Experiment


def judge_notes(experiments: list[Experiment]) -> list[str]:
    """For the first judge and the second what is to be known beside its scores; empty where there is nothing."""
    number = max(len(experiment.judges) for experiment in experiments)
    return [_note(experiments, place, named=number > 1) for place in range(number)]


def _note(experiments: list[Experiment], place: int, named: bool) -> str:
    asked = {one.name: one.judges[place] for one in experiments if place < len(one.judges)}
    kinds = " or ".join(dict.fromkeys(judge["kind"] for judge in asked.values()))
    selected = [name for name, judge in asked.items() if judge["selects"]]
    seen = [name for name, judge in asked.items() if judge["sees"]]
    sentences = []
    if differing := differing_judges(place, *experiments):
        sentences.append(f"{differing[0].upper()}{differing[1:]}: these scores cannot be compared.")
    elif named:
        sentences.append(f"Judge: {judge_name(next(iter(asked.values())))}.")
    if selected:
        sentences.append(
            f"Selected by what judges: the {kinds} that gives these scores has also selected the data of "
            f"{listed(selected)}, so that they can rise because captions are to its taste, mistakes included, and not "
            "because they are better: see whether the other scores say the same."
        )
    if seen:
        sentences.append(
            f"Seen by what judges: the model{'s' * (len(seen) > 1)} of {listed(seen)} see{'s' * (len(seen) == 1)} with "
            f"the image tower of this {kinds}, so that both overlook the same."
        )
    return " ".join(sentences)


@dataclass(frozen=True)
class Correlation:
    experiment: str
    index: int
    group: str
    metric: str
    captions: str  # how many, of all seeds
    rank_correlation: str


@dataclass(frozen=True)
class Contrast:
    """A difference to the reference, as each judge sees it."""

    experiment: str
    index: int
    group: str
    metric: str
    first: tuple[str, str]  # the difference and its interval
    second: tuple[str, str]
    agreement: str
    shown: str  # better, worse or same, for the style sheet; empty where the judges do not agree


@dataclass(frozen=True)
class Agreement:
    correlations: list[Correlation]
    contrasts: list[Contrast]


def agreement(experiments: list[Experiment], differences: dict[str, Estimates]) -> Agreement | None:
    """How far both judges agree on captions of the images themselves; None where there is no second judge."""
    correlations, contrasts = list(_correlations(experiments)), list(_contrasts(experiments, differences))
    return Agreement(correlations, contrasts) if correlations else None


def _correlations(experiments: list[Experiment]) -> Iterator[Correlation]:
    for index, experiment in enumerate(experiments):
        for group in _own_groups(experiment.groups):
            for metric in JUDGED:
                if SECOND + metric in experiment.groups[group]:
                    count, correlation = rank_correlation(experiment.scores, group, metric)
                    text = "–" if pd.isna(correlation) else f"{correlation:.2f}".replace("-", "−")
                    labels = GROUP_LABELS[group], HEADLINES[metric][0]
                    yield Correlation(experiment.name, index, *labels, grouped(count), text)


def rank_correlation(runs: list[Scores], group: str, metric: str) -> tuple[int, float]:
    """The number of captions, and Spearman's correlation of their two scores; NaN where one judge scores all alike.

    Several captions on one image count by their mean.
    """
    values = [{name: run.groups[group][name] for name in (metric, SECOND + metric)} for run in runs]
    scores = pd.concat(pd.DataFrame({name: one.sums / one.counts for name, one in pair.items()}) for pair in values)
    ranks = scores.rank()  # equal scores share their mean rank
    return int(sum(pair[metric].counts.sum() for pair in values)), float(ranks[metric].corr(ranks[SECOND + metric]))


def _contrasts(experiments: list[Experiment], differences: dict[str, Estimates]) -> Iterator[Contrast]:
    for index, experiment in enumerate(experiments):
        estimates = differences.get(experiment.name, {})
        for group in _own_groups(estimates):
            for metric in JUDGED:
                pair = estimates[group].get(metric), estimates[group].get(SECOND + metric)
                if all(pair):
                    yield Contrast(
                        experiment.name,
                        index,
                        GROUP_LABELS[group],
                        HEADLINES[metric][0],
                        *((gain(metric, one["mean"]), interval(metric, one, gain)) for one in pair),
                        *agree(metric, *pair),
                    )


def agree(metric: str, first: Estimate, second: Estimate) -> tuple[str, str]:
    """What both intervals together say, in words and as a class of the style sheet."""
    one, two = verdict(metric, first), verdict(metric, second)
    if one == two != NO_DIFFERENCE:
        return f"both: {one}{scope(first)}", one
    if NO_DIFFERENCE not in (one, two):
        return f"they contradict each other: {one}, {two}{scope(first)}", ""
    same_sign = (first["mean"] > 0) == (second["mean"] > 0) and (first["mean"] < 0) == (second["mean"] < 0)
    signs = f"; the signs {'agree' if same_sign else 'differ'}"
    if one == two:
        return f"neither shows a difference{signs}", "same"
    shown = f"only the first: {one}" if two == NO_DIFFERENCE else f"only the second: {two}"
    return f"{shown}{scope(first)}{signs}", ""


def _own_groups(groups: dict) -> list[str]:
    return [group for group in GROUP_LABELS if group.endswith("/own") and group in groups]
