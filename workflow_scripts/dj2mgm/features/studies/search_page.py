"""Parts of a study's page about its search: the scores of all trials in each rung, and the commands that follow."""

from pathlib import Path
from typing import Any

from dj2mgm.cli.messages import format_duration
from dj2mgm.features.studies.axes import Interval
from dj2mgm.features.studies.study_records import ShownSearch, ShownStudy, ShownTrial
from dj2mgm.features.studies.study_table import ParallelPlot, PlainTable, TrialLine
from dj2mgm.features.studies.trials import find_importances
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.comparison import HeadlineScore, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.reporting.verdicts.verdict_sentences import build_keep_command, build_snakemake_command
from dj2mgm.runs.experiments import REFERENCE

MIN_TRIALS = 8  # with fewer trials, the best quarter is not marked
STEPS = {"explore": "new trials", "promote": "more rows"}


def list_next_commands(experiments: list[ExperimentResults], study: ShownStudy, folder: Path) -> list[str]:
    """Return the commands that confirm the best trial of a search: they keep the best two, and decide on fresh seeds.

    Args:
        experiments: the experiments of the page.
        study: the study; there are no commands without a search, or before a trial is trained on all rows.
        folder: folder of its page, of the study's name.
    """
    name = folder.name
    shown = {experiment.name: experiment for experiment in experiments}
    ranked = study.search.rank_trials() if study.search else []
    best = [shown[trial.name] for trial in ranked if trial.name in shown][:2]
    if not best:
        return []
    suffixes = {trial.name.removeprefix(f"{study.experiment}-"): trial for trial in best}
    winner, *others = (f"{name}_{suffix}" for suffix in suffixes)
    opponents = [REFERENCE, study.experiment, *others]
    if study.search.has_fewer_rows(best[0].name):
        opponents.append(f"{winner}-random")
    against = f"{{against: [{', '.join(dict.fromkeys(opponents))}]}}"
    decide = build_snakemake_command(experiments[0], "decide", experiment=winner, decide=against)
    return [*(build_keep_command(trial, folder, suffix) for suffix, trial in suffixes.items()), decide]


def build_cost_table(search: ShownSearch) -> list[PlainTable]:
    """Return expected and measured GPU times of each batch; no table if none was measured."""
    rows = []
    for number, batch in enumerate(search.batches, start=1):
        if batch.seconds and batch.runs:
            seconds_per_run = batch.seconds / batch.runs
            expected = format_duration(batch.price) if batch.price else "–"
            ratio = f"{seconds_per_run / batch.price:.2f}" if batch.price else "–"
            share = f"{100 * batch.fraction:g} %"
            rows.append(
                [
                    f"{number}: {STEPS[batch.step]}",
                    share,
                    str(batch.runs),
                    expected,
                    format_duration(seconds_per_run),
                    ratio,
                ]
            )
    note = (
        "The table compares the expected with the measured GPU time of a training with one seed. When the batch was "
        "planned, the time of earlier trainings on equally many rows was expected, or the scaled time of full "
        "trainings."
    )
    heads = ["Batch", "Rows", "Trainings", "Expected", "Measured", "Measured / expected"]
    return [PlainTable("Cost of each batch", note, heads, rows)] if rows else []


def build_importance_table(search: ShownSearch, score_kind: HeadlineScore) -> list[PlainTable]:
    """Return the importance of each setting of the space; no table for few trials.

    Args:
        search: the search, as its page shows it.
        score_kind: the score that ranks the trials of the first rung.
    """
    scored = [(trial.changes, score) for trial in search.trials if (score := trial.scores[0]) is not None]
    if len(scored) < MIN_TRIALS:
        return []
    best = sorted(scored, key=lambda pair: -pair[1])[: len(scored) // 4]
    rows = []
    for key, share in find_importances(search.axes, scored).items():
        values = [changes[key] for changes, _ in best]
        if isinstance(search.axes[key], list):
            common = ", ".join(f"{value} ({values.count(value)})" for value in search.axes[key] if value in values)
        else:
            common = f"{min(values):.3g} to {max(values):.3g}"
        rows.append([key, f"{100 * share:.0f} %", common])
    note = (
        "The column “Share” states how much each setting explains the difference between the best quarter of "
        f"{len(scored)} trials and the others (PED-ANOVA), by the {score_kind.title} in the first rung (the smallest "
        f"share of the rows). The last column has the values among the best {len(best)}."
    )
    return [PlainTable("Importance of the settings", note, ["Setting", "Share", "Among the best"], rows)]


def draw_parallels(search: ShownSearch, score_kind: HeadlineScore) -> ParallelPlot | None:
    """Return the settings and scores of all trials in the first rung; None for few trials."""
    scored = [(trial, score) for trial in search.trials if (score := trial.scores[0]) is not None]
    if len(scored) < MIN_TRIALS:
        return None
    scored.sort(key=lambda pair: pair[1])
    scale = Scale(scored[0][1], scored[-1][1])
    ends = format_score(score_kind.metric, scale.low), format_score(score_kind.metric, scale.high)
    axes = [(key, *_format_ends(axis)) for key, axis in search.axes.items()] + [(score_kind.title, *ends)]
    lines = []
    for rank, (trial, score) in enumerate(scored):
        positions = [
            *(_find_position(axis, trial.changes[key]) for key, axis in search.axes.items()),
            scale.locate(score),
        ]
        label = f"{trial.name}: {format_score(score_kind.metric, score)}"
        best = rank >= len(scored) - len(scored) // 4
        lines.append(
            TrialLine([(number, round(100 - position, 2)) for number, position in enumerate(positions)], label, best)
        )
    return ParallelPlot(axes, lines)


def _find_position(axis: list | Interval, value: Any) -> float:
    """Return the position of a value, in percent of its axis."""
    if isinstance(axis, list):
        return Scale(0, len(axis) - 1).locate(axis.index(value))
    return Scale(axis.low, axis.high, axis.log).locate(value)


def _format_ends(axis: list | Interval) -> tuple[str, str]:
    return (str(axis[0]), str(axis[-1])) if isinstance(axis, list) else (f"{axis.low:g}", f"{axis.high:g}")


def build_trial_table(
    search: ShownSearch, rung_kinds: list[HeadlineScore], headline: HeadlineScore
) -> list[PlainTable]:
    """Return the scores of all trials in each rung, best first; no table for a single rung.

    Args:
        search: the search, as its page shows it.
        rung_kinds: the score that ranks the trials of each rung.
        headline: the score of full trainings.
    """
    if len(search.rungs) == 1:
        return []

    def rank(trial: ShownTrial) -> tuple:
        scores = [score for score in trial.scores if score is not None]
        return (-len(scores), -(scores or [0.0])[-1])

    heads = ["Trial", *(f"{100 * rung:g} % of the rows" for rung in search.rungs), "Changes"]
    rows = []
    for trial in sorted(search.trials, key=rank):
        scores = [
            "–" if score is None else format_score(kind.metric, score)
            for kind, score in zip(rung_kinds, trial.scores, strict=True)
        ]
        rows.append([trial.name, *scores, "; ".join(f"{key} {value}" for key, value in trial.changes.items())])
    note = (
        f"{_describe_scores(search, rung_kinds, headline)} Only the best trials of a rung are trained on more rows. "
        "Scores by which trials were chosen are too high on average."
    )
    return [PlainTable("Trials", note, heads, rows)]


def _describe_scores(search: ShownSearch, rung_kinds: list[HeadlineScore], headline: HeadlineScore) -> str:
    """Return which score each rung has, in one or two sentences."""
    shares = [f"{100 * share:g} %" for share, kind in zip(search.rungs, rung_kinds, strict=True) if kind != headline]
    if not shares:
        return f"Scores are the {headline.title}."
    return (
        f"Scores are the {headline.title}. Trainings on {join_words(shares)} of the rows are scored by the "
        f"{rung_kinds[0].title} instead (docs/features/studies.md)."
    )
