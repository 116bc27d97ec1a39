"""Learning curves of a study: the score at more rows than there are, in total and by source."""

from dataclasses import astuple
from functools import partial

from dj2mgm.evaluation.learning_curve import (
    CURVE_LEVEL,
    MIN_RUNS,
    MIN_SIZES,
    Extrapolation,
    LearningCurve,
    estimate_least_noise,
)
from dj2mgm.evaluation.metric_kinds import find_score_range
from dj2mgm.evaluation.run_scores import MetricValues
from dj2mgm.reporting.comparison import format_difference, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.variants_page import PlainTable
from dj2mgm.reporting.verdicts.headline_scores import HeadlineScore
from dj2mgm.score_groups import DIFFERENCE, split_group

NO_EXTRAPOLATION = "no extrapolation: the scores are not shown to follow a power law"
MORE_ROWS = 1000  # additional rows of the advice; at most as many as there are


def build_curve_table(experiments: list[ExperimentResults], headline: HeadlineScore) -> list[PlainTable]:
    """Return the table of all learning curves; no table without variants on shares of the rows."""
    shares = [experiment.config.jsonl.fraction for experiment in experiments]
    sources = dict.fromkeys(name for share in shares if isinstance(share, dict) for name in share)
    curves = [(source, _list_points(experiments, headline, source)) for source in [None, *sources]]
    rows = [_build_row(source, points, headline) for source, points in curves if _is_curve(points)]
    note = (
        f"A power law is fitted to the {headline.title} of runs on shares of the rows. Each share contains the smaller "
        f"ones. All intervals have a level of {100 * (1 - CURVE_LEVEL):.0f} %. “On twice as many” predicts the score "
        "of one more run, and “change by more rows” the change of the mean score. In the row of a source, only the "
        "rows of this source grow. The extrapolation holds only for further rows of the same kind."
    )
    heads = ["Source", "Samples", "Score on all of them", "On twice as many", "Change by more rows"]
    return [PlainTable("Learning curve", note, heads, rows)] if rows else []


def _is_curve(points: list[tuple[int, MetricValues]]) -> bool:
    return len({rows for rows, _ in points}) >= MIN_SIZES and len(points) >= MIN_RUNS


def _list_points(
    experiments: list[ExperimentResults], headline: HeadlineScore, source: str | None
) -> list[tuple[int, MetricValues]]:
    """Return rows and scores of the runs on all rows, and on shares of one source's rows or of all."""
    points = []
    for experiment in experiments:
        share = experiment.config.jsonl.fraction
        reduced = [*share] if isinstance(share, dict) else [None]
        if experiment.control is not None or (share != 1 and reduced != [source]):
            continue
        for run in experiment.runs:
            values = run.scores.groups.get(headline.group, {}).get(headline.metric)
            if values is not None and (rows := count_trained_samples(run, source)):
                points.append((rows, values))
    return points


def count_trained_samples(run: RunResults, source: str | None) -> int:
    """Return the number of samples that a run trains on in both stages; of one source, or of all."""
    counts = run.jsonl.files.values()
    if source is not None:
        return sum(file.sources[source].rows_out for file in counts if source in file.sources)
    return sum(file.rows_out for file in counts)


def _build_row(source: str | None, points: list[tuple[int, MetricValues]], headline: HeadlineScore) -> list[str]:
    """Return the cells of a learning curve: rows, score, and extrapolations, limited to scores that are possible."""
    row_counts, values = zip(*points, strict=True)
    curve = LearningCurve(row_counts, [value.mean for value in values], estimate_least_noise(values))
    max_rows, extra_rows = int(curve.most), min(MORE_ROWS, int(curve.most))
    score, change = partial(format_score, headline.metric), partial(format_difference, headline.metric)
    best = [value.mean for row_count, value in points if row_count == max_rows]
    measured = ["all" if source is None else source, format_integer(max_rows), score(sum(best) / len(best))]
    if not curve.fits:
        return [*measured, NO_EXTRAPOLATION, "–"]
    doubled = curve.predict_score(2 * max_rows)
    if split_group(headline.group)[1] != DIFFERENCE:
        ends = find_score_range(headline.metric)
        doubled = Extrapolation(*(min(max(value, ends[0]), ends[1]) for value in astuple(doubled)))

    def describe(show: partial, extrapolation: Extrapolation) -> str:
        return f"{show(extrapolation.median)} ({show(extrapolation.low)} to {show(extrapolation.high)})"

    return [
        *measured,
        describe(score, doubled),
        f"{format_integer(extra_rows)} more: {describe(change, curve.predict_gain(max_rows + extra_rows))}",
    ]
