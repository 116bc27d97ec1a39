"""Notes on the models that judge captions, the agreement of two judges, and data that leak into the training data.

Leaks are shown as counts, with their treatment, and with scores without them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from dj2mgm.evaluation.groups import HELD_OUT, SECOND_JUDGE_PREFIX, read_leaked_ids
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.run_scores import GroupEstimates, RunScores, aggregate, drop_images
from dj2mgm.reporting.comparison import (
    GROUP_LABELS,
    HEADLINES,
    JUDGED_METRICS,
    classify_difference,
    describe_judge_difference,
    describe_verdict_scope,
    find_title,
    format_difference,
    format_interval,
    format_score,
)
from dj2mgm.reporting.experiment_results import ExperimentResults, group_experiments
from dj2mgm.reporting.rendering import Cell, Table, TableRow, format_integer, join_words
from dj2mgm.score_groups import OWN, split_group
from dj2mgm.storage.files import read_json
from dj2mgm.verdict_kinds import VerdictKind


def describe_judges(experiments: list[ExperimentResults]) -> list[str]:
    """Return a note on the scores of each judge, the first judge first; empty if there is nothing to note."""
    number = max(len(experiment.judges) for experiment in experiments)
    return [_describe_judge(experiments, index, with_name=number > 1) for index in range(number)]


def _describe_judge(experiments: list[ExperimentResults], index: int, with_name: bool) -> str:
    """Return sentences about judge `index`: its differences between experiments, and what it shares with the models."""
    judges = {experiment.name: experiment.judges[index] for experiment in experiments if index < len(experiment.judges)}
    selected_names = [name for name, judge in judges.items() if judge.selects]
    sharing_names = [name for name, judge in judges.items() if judge.sees]
    sentences = []
    if difference := describe_judge_difference(index, *experiments):
        sentences.append(f"{difference[0].upper()}{difference[1:]}. These scores cannot be compared.")
    elif with_name:
        sentences.append(f"Judge: {next(iter(judges.values())).title}.")
    if selected_names:
        sentences.append(
            f"The judge also selected the data of {join_words(selected_names)}, so captions with its mistakes may get "
            "high scores. Check that other scores agree."
        )
    if sharing_names:
        sentences.append(
            f"The judge shares its image tower with the trained model{'s' * (len(sharing_names) > 1)} of "
            f"{join_words(sharing_names)}, so it overlooks the same details."
        )
    return " ".join(sentences)


@dataclass(frozen=True)
class Agreement:
    """The tables that compare two judges: caption by caption, and on each difference from the reference."""

    correlations: Table
    contrasts: Table


def measure_judge_agreement(
    experiments: list[ExperimentResults], differences: dict[str, GroupEstimates]
) -> Agreement | None:
    """Compare both judges' scores of captions of the right images; None if there is no second judge."""
    titles = ["captions of", "model", "score", "captions", "rank correlation"]
    correlations = list(_build_correlations(experiments))
    if not correlations:
        return None
    contrast_titles = ["experiment", "model", "score", "first judge", "second judge", "agreement"]
    contrasts = list(_build_contrasts(experiments, differences))
    return Agreement(
        Table("Rank correlation of both judges", titles, correlations, colored=True),
        Table("Differences by each judge", contrast_titles, contrasts, colored=True),
    )


def _build_correlations(experiments: list[ExperimentResults]) -> Iterator[TableRow]:
    """Yield the rank correlation of both judges' scores of the same captions, of all seeds."""
    for experiment in experiments:
        for group in _list_own_groups(experiment.groups):
            for metric in JUDGED_METRICS:
                if SECOND_JUDGE_PREFIX + metric in experiment.groups[group]:
                    count, correlation = describe_rank_correlation(experiment.scores, group, metric)
                    text = "–" if pd.isna(correlation) else f"{correlation:.2f}".replace("-", "−")
                    words = GROUP_LABELS[group], find_title(metric), format_integer(count), text
                    yield TableRow(experiment.name, list(map(Cell, words)))


def describe_rank_correlation(runs: list[RunScores], group: str, metric: str) -> tuple[int, float]:
    """Return the number of captions and Spearman's correlation of their scores; NaN if a judge's scores are all equal.

    Several captions of one image count by their mean.
    """
    values = [{name: run.groups[group][name] for name in (metric, SECOND_JUDGE_PREFIX + metric)} for run in runs]
    scores = pd.concat(
        pd.DataFrame({name: per_image.sums / per_image.counts for name, per_image in pair.items()}) for pair in values
    )
    ranks = scores.rank()  # equal scores share their mean rank
    return int(sum(pair[metric].counts.sum() for pair in values)), float(
        ranks[metric].corr(ranks[SECOND_JUDGE_PREFIX + metric])
    )


def _build_contrasts(
    experiments: list[ExperimentResults], differences: dict[str, GroupEstimates]
) -> Iterator[TableRow]:
    """Yield the differences that both judges have measured."""
    for experiment in experiments:
        estimates = differences.get(experiment.name, {})
        for group in _list_own_groups(estimates):
            for metric in JUDGED_METRICS:
                pair = estimates[group].get(metric), estimates[group].get(SECOND_JUDGE_PREFIX + metric)
                if all(pair):
                    cells = [Cell(GROUP_LABELS[group]), Cell(find_title(metric))]
                    for estimate in pair:
                        interval = format_interval(metric, estimate, format_difference)
                        cells.append(Cell(format_difference(metric, estimate.mean), interval))
                    words, css_class = describe_agreement(metric, *pair)
                    yield TableRow(experiment.name, [*cells, Cell(words, css_class=css_class)])


def describe_agreement(metric: str, first: Estimate, second: Estimate) -> tuple[str, str]:
    """Describe what the intervals of both judges show, in words and as a class of the style sheet."""
    first_verdict, second_verdict = classify_difference(metric, first), classify_difference(metric, second)
    if first_verdict == second_verdict != VerdictKind.NO_DIFFERENCE:
        return f"both: {first_verdict}{describe_verdict_scope(first)}", first_verdict.css_class
    if VerdictKind.NO_DIFFERENCE not in (first_verdict, second_verdict):
        return f"contradictory: {first_verdict}, {second_verdict}{describe_verdict_scope(first)}", ""
    same_sign = (first.mean > 0) == (second.mean > 0) and (first.mean < 0) == (second.mean < 0)
    signs = f"; the signs {'agree' if same_sign else 'differ'}"
    if first_verdict == second_verdict:
        return f"neither shows a difference{signs}", "same"
    finding = f"only the first: {first_verdict}"
    if first_verdict == VerdictKind.NO_DIFFERENCE:
        finding = f"only the second: {second_verdict}"
    return f"{finding}{describe_verdict_scope(first)}{signs}", ""


def _list_own_groups(groups: dict) -> list[str]:
    return [group for group in GROUP_LABELS if split_group(group)[1] == OWN and group in groups]


COUNTS = {  # columns of the table; the last three count texts, which are compared for benchmarks only
    "references": "images",
    "leaked": "leaked images",
    "questions": "questions about leaked images",
    "training_images": "matching images in the dataset",
    "training_rows": "rows with these images",
    "texts": "questions compared by text",
    "leaked_texts": "leaked questions",
    "text_rows": "instructions with leaked questions",
}


@dataclass(frozen=True)
class LeakSection:
    """Leaks of one dataset."""

    dataset: str
    link: str  # to the file that lists the matches
    matches: Table  # leaks of the held-out images and of each benchmark
    treatments: dict[str, str]  # of leaking rows, by experiment; empty if nothing leaks
    leaked: str  # number of held-out images that leak
    scores: Table  # with and without the images that leak; no rows if no held-out image leaks


def build_leak_sections(experiments: list[ExperimentResults], page: str | Path) -> Iterator[LeakSection]:
    """Return a section for each dataset with a leak search; links are relative to `page`."""
    for folder, group in group_experiments(experiments, lambda experiment: experiment.leaks).items():
        if folder is None:
            continue
        file = folder / "leaks.jsonl"
        leaked_ids, summary = read_leaked_ids(file, HELD_OUT), read_json(folder / "summary.json")
        has_leaks = any(counts["leaked"] or counts.get("leaked_texts") for counts in summary.values())
        name = group[0].dataset.name
        matches = [
            TableRow(
                "held-out images" if origin == HELD_OUT else origin,
                [Cell(_format_count(counts.get(key))) for key in COUNTS],
            )
            for origin, counts in summary.items()
        ]
        scores = [row for experiment in group if leaked_ids for row in _compare_scores(experiment, leaked_ids)]
        titles = ["experiment", "model", "metric", "all images", "without leaked images"]
        yield LeakSection(
            name,
            quote(os.path.relpath(file, Path(page).parent)),
            Table(f"Leaks of {name}", ["evaluation data", *COUNTS.values()], matches),
            {experiment.name: _describe_treatment(experiment) for experiment in group} if has_leaks else {},
            _format_count(summary.get(HELD_OUT, {}).get("leaked")),
            Table(f"Scores with and without leaks of {name}", titles, scores, colored=True),
        )


def _format_count(number: int | None) -> str:
    return "–" if number is None else format_integer(number)


def _describe_treatment(experiment: ExperimentResults) -> str:
    if experiment.config.jsonl.leaks == "keep":
        return "was trained on these rows"
    files = experiment.runs[0].jsonl.files
    pairs, instructions = (
        format_integer(dropped.get("leaked", 0) + dropped.get("leaked_text", 0))
        for dropped in (files[split].dropped for split in ("pretrain", "finetune"))
    )
    return f"dropped {pairs} pairs (after the filters) and {instructions} instructions"


def _compare_scores(experiment: ExperimentResults, leaked_ids: set[str]) -> Iterator[TableRow]:
    """Return the headline metrics with and without the leaked images; controls are left out."""
    rest = aggregate([drop_images(run, leaked_ids) for run in experiment.scores])
    for group, label in GROUP_LABELS.items():
        if split_group(group)[1] == OWN:
            for metric in HEADLINES:
                if every := experiment.groups.get(group, {}).get(metric):
                    pair = every, rest.get(group, {}).get(metric)
                    cells = [
                        estimate and Cell(format_score(metric, estimate.mean), format_interval(metric, estimate))
                        for estimate in pair
                    ]
                    yield TableRow(experiment.name, [Cell(label), Cell(find_title(metric)), *cells])
