"""Page of a study: its table, notes, charts and verdicts."""

from pathlib import Path
from typing import Any

from dj2mgm.cli.messages import format_duration
from dj2mgm.evaluation.groups import find_score_range
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.features.studies.learning_curves import build_curve_table
from dj2mgm.features.studies.proxies import build_mixture_table, build_proxy_table
from dj2mgm.features.studies.search_page import (
    build_cost_table,
    build_importance_table,
    build_trial_table,
    draw_parallels,
    list_next_commands,
)
from dj2mgm.features.studies.study_records import MixtureScores, ShownSearch, ShownStudy
from dj2mgm.features.studies.study_table import (
    COUNT_COLUMNS,
    FAULT_PREFIX,
    ComparedVariant,
    CostChart,
    CostPoint,
    ParallelPlot,
    PlainTable,
    StudyPageContent,
    find_estimate,
    format_count,
    select_table_scores,
)
from dj2mgm.features.studies.trial_scores import find_trial_score
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.comparison import (
    GROUP_LABELS,
    HeadlineScore,
    classify_difference,
    describe_chance,
    describe_coverage,
    describe_obstacles,
    describe_paired_seeds,
    find_title,
    format_difference,
    format_interval,
    format_score,
)
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import join_words
from dj2mgm.reporting.sections.judge_section import describe_judges
from dj2mgm.reporting.variants_page import CountCell, ScoreCell, VariantRow, place_mark
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.verdict_cards import VerdictCard
from dj2mgm.score_groups import OWN_GROUP
from dj2mgm.settings.validation import load_settings
from dj2mgm.verdict_kinds import VerdictKind

SUMMARY_ORDER = (
    VerdictKind.BETTER,
    VerdictKind.EQUIVALENT,
    VerdictKind.WORSE,
    VerdictKind.UNDECIDED,
    VerdictKind.NONE,
)
MAX_CARDS = 8  # maximum number of verdicts above the table
MAX_NAMES = 3  # names for each verdict in the summary
KEPT_TEXTS = {True: "yes", False: "no", None: "not shown"}


def _summarize(experiments: list[ExperimentResults], cards: list[VerdictCard]) -> str:
    """Return how many variants have which verdict, with the names of a few; empty for fewer than two variants."""
    reference, *compared_experiments = experiments
    variants = {experiment.name for experiment in compared_experiments if not experiment.control}
    names: dict[VerdictKind, list[str]] = {kind: [] for kind in SUMMARY_ORDER}
    for card in cards:
        if card.verdict.experiment in variants:
            names[card.verdict.kind].append(card.verdict.experiment)
    counts = [
        f"{len(variant_names)} {kind or 'without a verdict'} ({_list_some(variant_names)})"
        for kind, variant_names in names.items()
        if variant_names
    ]
    if sum(map(len, names.values())) < 2:
        return ""
    return f"Compared with {reference.name}: {', '.join(counts)}."


def _list_some(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return join_words([*names[:MAX_NAMES], f"{more} more"] if more > 0 else names)


def build_study_page(
    assessment: Assessment, rows: list[ComparedVariant], study: ShownStudy, folder: Path
) -> StudyPageContent:
    """Return the page; `rows` are those of the table, and `folder` has the study's name."""
    reference, *variant_rows = rows
    experiments, headline, order = [row.experiment for row in rows], assessment.headline, [row.name for row in rows]
    cards = sorted(assessment.cards, key=lambda card: order.index(card.verdict.experiment))
    merged_cards = assessment.merge_cards(cards)
    scores = select_table_scores(rows, headline)
    counts = [
        column for column in COUNT_COLUMNS if column == "seconds" or len({row.counts.get(column) for row in rows}) > 1
    ]
    counts = [column for column in counts if any(row.counts.get(column) is not None for row in rows)]
    scales = {key: _build_scale(variant_rows, key) for key in scores}
    differences = sum(bool(find_estimate(row.differences, key)) for row in variant_rows for key in scores)
    return StudyPageContent(
        study.page.title or folder.name.replace("_", " "),
        [
            study.description,
            study.search.progress if study.search else "",
            *_write_introduction(rows, study),
            describe_chance(differences, len(reference.experiment.runs) == 1),
            *_list_notes(assessment.experiments, len(merged_cards)),
        ],
        "Variant",
        [COUNT_COLUMNS[column][0] for column in counts],
        [(find_title(metric), GROUP_LABELS[group].lower()) for group, metric in scores],
        [
            VariantRow(
                row.name,
                [_build_count_cell(row, reference, column) for column in counts],
                [_build_score_cell(row, key, scales[key], study.page.keeps) for key in scores],
                describe_row(row, reference),
                reference=row is reference,
            )
            for row in rows
        ],
        zero_line=True,
        chart=draw_cost_chart(rows, headline),
        parallels=_draw_parallels(experiments, study.search),
        tables=_list_tables(experiments, headline, study),
        commands=list_next_commands(experiments, study, folder),
        summary=_summarize(assessment.experiments, cards),
        cards=merged_cards[:MAX_CARDS],
        unlearned=assessment.unlearned,
    )


def _list_notes(experiments: list[ExperimentResults], cards: int) -> list[str]:
    """Return sentences on verdicts that are left out, scores that are not compared, and the judge of captions."""
    reference, *variants = experiments
    cut = f"The verdicts on the best {MAX_CARDS} of {cards} are shown, corrected for all of them."
    obstacles = [text for variant in variants for text in describe_obstacles(variant, reference)]
    return [*([cut] if cards > MAX_CARDS else []), *obstacles, *describe_judges(experiments)[:1]]


def _draw_parallels(experiments: list[ExperimentResults], search: ShownSearch | None) -> ParallelPlot | None:
    return draw_parallels(search, find_trial_score(experiments, search.goals, search.rungs[0])) if search else None


def _list_tables(experiments: list[ExperimentResults], headline: HeadlineScore, study: ShownStudy) -> list[PlainTable]:
    """Return the tables below the variants, in the page's order; tables without content are missing."""
    search = study.search
    search_tables = []
    if search:
        rung_kinds = [find_trial_score(experiments, search.goals, share) for share in search.rungs]
        search_tables = [
            *build_trial_table(search, rung_kinds, find_trial_score(experiments, search.goals, 1)),
            *build_importance_table(search, rung_kinds[0]),
            *build_cost_table(search),
        ]
    merged = load_settings(MixtureScores, study.merged) if study.merged else None
    return [
        *search_tables,
        *build_curve_table(experiments, headline),
        *build_mixture_table(experiments, headline, merged),
        *build_proxy_table(experiments, headline, search, merged),
    ]


def draw_cost_chart(rows: list[ComparedVariant], headline: HeadlineScore) -> CostChart | None:
    """Return a chart of headline score against time; None if fewer than three variants were measured."""
    key = headline.group, headline.metric
    candidates = [(row, row.counts.get("seconds"), find_estimate(row.experiment.groups, key)) for row in rows]
    measured = [(row, seconds, score) for row, seconds, score in candidates if seconds and score]
    if len(measured) < 3:
        return None
    times, ends = [seconds for _, seconds, _ in measured], [score.ends for _, _, score in measured]
    time_scale = Scale(0, 1.05 * max(times))
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    lowest, highest = find_score_range(headline.metric)
    score_scale = Scale(max(lowest, low - 0.05 * (high - low)), min(highest, high + 0.05 * (high - low)))
    points = [
        CostPoint(
            time_scale.locate(seconds),
            place_mark(score_scale, score),
            f"{row.name}: {format_score(headline.metric, score.mean)}, {format_duration(seconds)}",
            row is rows[0],
            not any(
                other_seconds < seconds and _is_better(other_score, score, headline.lower_is_better)
                for _, other_seconds, other_score in measured
            ),
        )
        for row, seconds, score in measured
    ]
    labels = [
        format_score(headline.metric, score_scale.low),
        format_score(headline.metric, score_scale.high),
        format_duration(time_scale.high),
    ]
    return CostChart(headline.title, points, labels)


def _is_better(estimate: Estimate, other_estimate: Estimate, lower_is_better: bool) -> bool:
    return estimate.mean < other_estimate.mean if lower_is_better else estimate.mean > other_estimate.mean


def _write_introduction(rows: list[ComparedVariant], study: ShownStudy) -> list[str]:
    """Return the paragraphs that explain the table; some are empty."""
    reference, *variant_rows = rows
    seeds, keeps = len(reference.experiment.runs), study.page.keeps
    random = [row for row in variant_rows if row.experiment.control]
    return [
        f"Each row compares a variant with {reference.name}, the reference, trained with "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}.",
        "Differences are variant − reference, paired by seed and image, with 95 % intervals. A hollow dot means "
        "that no difference is shown.",
        *(
            f"{row.name} is trained on as many rows as {row.experiment.control.experiment}, drawn at random from the "
            "rows that the baseline's recipe keeps."
            for row in random
        ),
        f"“At least {100 * keeps:g} %: yes” means that the 95 % interval of (the variant's score − {100 * keeps:g} % "
        "of the reference's score) is above 0, “no” that it is below 0, and “not shown” that it contains 0."
        if keeps
        else "",
        "Memory columns show the peak.",
        describe_coverage(seeds),
        describe_paired_seeds([row.experiment for row in rows]),
    ]


def describe_row(row: ComparedVariant, reference: ComparedVariant) -> str:
    """Describe a row of the table.

    That is the reference's own changes, or the variant's settings that differ from the reference, then the change in
    the number of faults.
    """
    reference_changes = {} if row is reference else reference.experiment.changes
    changes = row.experiment.changes.items()
    texts = ["reference"] if row is reference else []
    texts += [
        f"{key} {_shorten_value(value)}"
        for key, value in changes
        if reference_changes.get(key, ...) != value and _shorten_value(value)
    ]
    faults = {
        name.removeprefix(FAULT_PREFIX).replace("_", " "): (value or 0) - (reference.counts.get(name) or 0)
        for name, value in row.counts.items()
        if name.startswith(FAULT_PREFIX) and name not in COUNT_COLUMNS
    }
    kinds = sorted(faults, key=lambda kind: -abs(faults[kind]))
    if changed := ", ".join(f"{kind} {format_count(faults[kind], signed=True)}" for kind in kinds if faults[kind]):
        texts.append(f"faults: {changed}")
    return "; ".join(texts)


def _shorten_value(value: Any) -> str:
    """Return a setting's value in a few characters; empty for a whole section."""
    words = {True: "on", False: "off", None: "none"}
    if isinstance(value, dict):
        return ""
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _build_count_cell(row: ComparedVariant, reference: ComparedVariant, name: str) -> CountCell:
    """Return a cell with a count or cost. A count also shows its difference from the reference."""
    own_count, reference_count, show = row.counts.get(name), reference.counts.get(name), COUNT_COLUMNS[name][1]
    if own_count is None:
        return CountCell("–")
    changed = row is not reference and reference_count is not None and show is format_count
    return CountCell(show(own_count), format_count(own_count - reference_count, signed=True) if changed else "")


def _build_score_cell(
    row: ComparedVariant, key: tuple[str, str], scale: Scale, keeps: float | None
) -> ScoreCell | None:
    """Return a score with its difference from the reference, on an axis that all variants share."""
    estimate, difference = find_estimate(row.experiment.groups, key), find_estimate(row.differences, key)
    if not estimate:
        return None
    metric = key[1]
    text, interval = format_score(metric, estimate.mean), format_interval(metric, estimate)
    if not difference:
        return ScoreCell(text, [interval])
    verdict = classify_difference(metric, difference)
    change, ends = format_difference(metric, difference.mean), format_interval(metric, difference, format_difference)
    kept_score = row.kept_scores.get(metric) if key[0] == OWN_GROUP else None
    lines = [f"{change}, {ends}"]
    if kept_score:
        kept_text = KEPT_TEXTS[kept_score.enough]
        lines.append(f"{100 * kept_score.share:.1f} % kept, at least {100 * keeps:g} %: {kept_text}")
    label = f"{verdict}: {change}, 95 % interval: {ends}"
    return ScoreCell(text, lines, verdict.css_class, place_mark(scale, difference), label)


def _build_scale(rows: list[ComparedVariant], key: tuple[str, str]) -> Scale:
    """Return the axis of a score's differences, with 0 in the middle."""
    differences = [difference for row in rows if (difference := find_estimate(row.differences, key))]
    end = 1.05 * max((abs(limit) for difference in differences for limit in difference.ends), default=0.0) or 1.0
    return Scale(-end, end)
