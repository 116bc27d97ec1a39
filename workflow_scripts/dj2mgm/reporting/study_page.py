"""Page and table of a study: rows, costs and scores of each variant, and differences from the reference.

All differences are variant − reference: if the variant without an operator has −3 points, the operator adds 3 points.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dj2mgm.config.settings.page_settings import ShownStudy
from dj2mgm.config.settings.shared import OWN_GROUP
from dj2mgm.errors import InputError
from dj2mgm.evaluation.caption_attributes import is_true
from dj2mgm.evaluation.groups import score_range
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.evaluation.seeds import (
    GroupEstimates,
    PerImage,
    Scores,
    aggregate,
    paired_difference,
    same_seeds,
)
from dj2mgm.files import read_jsonl
from dj2mgm.messages import format_duration
from dj2mgm.reporting.charts import Scale
from dj2mgm.reporting.comparison import (
    GROUP_LABELS,
    HEADLINES,
    VERDICT_CLASSES,
    chance_note,
    comparable_scores,
    coverage_note,
    describe_obstacles,
    difference_verdict,
    find_title,
    format_difference,
    format_interval,
    format_score,
    interval_ends,
    score_differences,
)
from dj2mgm.reporting.curve_page import curve_table
from dj2mgm.reporting.experiment import ExperimentResults, RunResults
from dj2mgm.reporting.proxies import proxy_table
from dj2mgm.reporting.rendering import format_number, join_words
from dj2mgm.reporting.search_page import draw_parallels, importance_table, price_table, trial_table
from dj2mgm.reporting.sections.judges import judge_notes
from dj2mgm.reporting.sections.training_charts import read_stage_memory
from dj2mgm.reporting.variants_page import (
    CostChart,
    CostPoint,
    CountCell,
    PlainTable,
    ScoreCell,
    VariantRow,
    VariantsPage,
    place_marker,
)
from dj2mgm.reporting.verdicts.first_screen import Brief, find_cost
from dj2mgm.reporting.verdicts.headline_verdicts import find_headline

# (group, metric) of the scores in the table, after the headline
TABLE_SCORES = [
    (OWN_GROUP, "attribute_accuracy"),
    (OWN_GROUP, "clip_score"),
    (OWN_GROUP, "vqa_accuracy"),
    ("pretrain/own", "attribute_accuracy"),
    ("pretrain/own", "clip_score"),
]
CAPTION_FAULTS = {"mismatched", "junk_text", "short_text"}  # faults that a new caption can correct
REPEAT = re.compile(r"#\d+$")  # data/training_jsonl.py adds it to the ids of repeated rows
FAULTS = "faults_"  # prefix of the count of each kind of fault
VERDICTS = {  # in the order of the summary
    "better": "better",
    "equivalent": "equivalent",
    "worse": "worse",
    "undecided": "undecided",
    "": "without a verdict",
}
MAX_NAMES = 3  # names for each verdict in the summary
KEPT_TEXTS = {True: "yes", False: "no", None: "not shown"}


@dataclass(frozen=True)
class Row:
    """A variant, or the reference."""

    experiment: ExperimentResults
    counts: dict[str, float | None]  # means over the seeds, in the order of COUNT_COLUMNS; None: not measured
    differences: GroupEstimates = field(default_factory=dict)  # differences from the reference; empty for the reference
    kept: dict[str, "Kept"] = field(default_factory=dict)  # by metric

    @property
    def name(self) -> str:
        return self.experiment.name


@dataclass(frozen=True)
class Kept:
    """The share of the reference's score that a variant keeps."""

    share: float
    enough: bool | None  # whether it is at least the study's `keeps`; None if the 95 % interval leaves it open


def format_count(value: float, signed: bool = False) -> str:
    """Format a mean count; small means that are not whole keep one digit."""
    return format_number(value, 0 if value == round(value) or abs(value) >= 100 else 1, signed)


def _gib(value: float) -> str:
    return f"{value:.2f} GiB"


COUNT_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {  # title, format
    "rows_filtered": ("Rows after filter", format_count),
    "rows_synthesized": ("Rows after synthesize", format_count),
    "faults_left": ("Planted faults left", format_count),
    "trained_parameters": ("Parameters trained", format_count),
    "seconds": ("Time of all stages", format_duration),
    "gpu_gib": ("Peak GPU memory", _gib),
    "host_gib": ("Peak host memory", _gib),
}


def compare_variants(experiments: list[ExperimentResults], study: ShownStudy) -> list[Row]:
    """Return the reference, then its variants by the headline, best first."""
    reference, *variants = experiments
    headline = find_headline(experiments)
    rows = []
    for variant in variants:
        differences, kept = score_differences(variant, reference), {}
        if study.page.keeps:
            kept = kept_shares(variant, reference, study.page.keeps)
        rows.append(Row(variant, count_rows_and_costs(variant), differences, kept))
    keys = [(headline.group, headline.metric), *TABLE_SCORES]
    rows.sort(key=lambda row: next((estimate["mean"] for key in keys if (estimate := find(row.differences, key))), 0.0))
    return [Row(reference, count_rows_and_costs(reference)), *(rows if headline.lower_is_better else reversed(rows))]


def count_rows_and_costs(experiment: ExperimentResults) -> dict[str, float | None]:
    """Return rows, planted faults and costs of an experiment: means over the seeds; for memory, the highest reading."""
    runs = experiment.runs
    faults, records = average_faults(experiment), [run.records["finetune"] for run in runs]
    memory = [read_stage_memory(run, "finetune") for run in runs]
    return {
        "rows_filtered": _mean([run.filter["rows_kept"] for run in runs]),
        "rows_synthesized": _mean([run.synthesize["rows_kept"] for run in runs if run.synthesize]),
        "faults_left": None if faults is None else sum(faults.values()),
        "trained_parameters": _mean([record.get("trained_parameters") for record in records]),
        "seconds": find_cost(experiment),
        "gpu_gib": max((reading.peak("gpu") for reading in memory if "gpu" in reading.sizes), default=None),
        "host_gib": max(reading.peak("host") for reading in memory),
    } | {f"{FAULTS}{kind}": number for kind, number in (faults or {}).items()}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def average_faults(experiment: ExperimentResults) -> dict[str, float] | None:
    """Return planted faults in the training rows by kind, as means over the seeds; None without ground truth."""
    file = experiment.dataset / "ground_truth.jsonl"
    if not file.is_file():
        return None
    truth = _ground_truth(file)
    counts = [faults_left(run, truth) for run in experiment.runs]
    kinds = sorted({row["fault"] for row in truth.values()} - {"clean"})
    return {kind: float(np.mean([count[kind] for count in counts])) for kind in kinds}


@cache
def _ground_truth(file: Path) -> dict[str, dict]:
    return {row["id"]: row for row in read_jsonl(file)}


def faults_left(run: RunResults, truth: dict[str, dict]) -> Counter[str]:
    """Count planted faults in the training rows of a run, by kind; a repeated row counts once.

    A replaced caption counts as corrected if the new one is true (evaluation/caption_attributes.py).
    """
    trained = {REPEAT.sub("", row["id"]) for row in _rows(run.stages["jsonl"] / "pretrain.jsonl", "write_jsonl")}
    recaptions = {}
    if "synthesize" in run.stages:
        rows = _rows(run.stages["synthesize"] / "synthesized.jsonl", "synthesize_captions")
        recaptions = {row["id"]: row["recaption"]["caption"] for row in rows if "recaption" in row}
    left: Counter[str] = Counter()
    for identifier in trained & set(truth):
        fault, true_caption = truth[identifier]["fault"], truth[identifier]["caption"]
        corrected = fault in CAPTION_FAULTS and is_true(recaptions.get(identifier, ""), true_caption)
        if fault != "clean" and not corrected:
            left[fault] += 1
    return left


def _rows(path: Path, rule: str) -> list[dict]:
    if not path.is_file():
        raise InputError(f"{path} is missing; run the rule {rule} first")
    return list(read_jsonl(path))


def kept_shares(experiment: ExperimentResults, reference: ExperimentResults, minimum: float) -> dict[str, Kept]:
    """Return the kept share of each fine-tuned score over the shared seeds, and whether it is at least `minimum`.

    The interval of own − minimum · reference, paired by seed and image, decides.
    """
    sides = comparable_scores(experiment, reference)
    margins = paired_difference(sides[0], [scale_scores(run, minimum) for run in sides[1]]).get(OWN_GROUP, {})
    if not margins:
        return {}
    own_estimates, reference_estimates = (
        aggregate(list(runs))[OWN_GROUP] for runs in zip(*same_seeds(*sides), strict=True)
    )
    shares = {}
    for metric, margin in margins.items():
        if metric in HEADLINES and reference_estimates[metric]["mean"] > 0:
            undecided = margin["low"] is None or margin["low"] < 0 <= margin["high"]
            shares[metric] = Kept(
                own_estimates[metric]["mean"] / reference_estimates[metric]["mean"],
                None if undecided else margin["low"] >= 0,
            )
    return shares


def scale_scores(run: Scores, factor: float) -> Scores:
    """Multiply all values of a run by `factor`."""

    def times(values: PerImage) -> PerImage:
        return replace(values, sums=factor * values.sums)

    groups = {group: {name: times(values) for name, values in metrics.items()} for group, metrics in run.groups.items()}
    return replace(run, groups=groups)


def find(estimates: GroupEstimates, key: tuple[str, str]) -> Estimate:
    """Return the estimate of a group and metric; empty if it was not measured."""
    return estimates.get(key[0], {}).get(key[1], {})


def shown_scores(rows: list[Row]) -> list[tuple[str, str]]:
    """Return group and metric of the scores in the table: the headline, then those that differ between variants."""
    headline = find_headline([row.experiment for row in rows])
    headline_key = headline.group, headline.metric
    means_by_key = {
        key: [estimate["mean"] for row in rows if (estimate := find(row.experiment.groups, key))]
        for key in dict.fromkeys([headline_key, *TABLE_SCORES])
    }
    return [key for key, means in means_by_key.items() if len({*means}) > 1 or (means and key[0] != "pretrain/own")]


def tabulate(rows: list[Row]) -> pd.DataFrame:
    """Return a row per variant, the reference first.

    Columns: experiment, seeds, each changed setting, counts, and scores `<stage>_<metric>` with `_low`, `_high`,
    `_difference`, `_difference_low`, `_difference_high` and `_kept`.
    """
    scores, counts = shown_scores(rows), {name: None for row in rows for name in row.counts}
    records = []
    for row in rows:
        record: dict[str, Any] = {"experiment": row.name, "seeds": len(row.experiment.runs)}
        record |= row.experiment.changes | {name: row.counts.get(name) for name in counts}
        for group, metric in scores:
            name = f"{group.replace('/own', '').replace('/', '_')}_{metric}"
            for suffix, estimates in (("", row.experiment.groups), ("_difference", row.differences)):
                estimate = find(estimates, (group, metric))
                ends = {"": estimate.get("mean"), "_low": estimate.get("low"), "_high": estimate.get("high")}
                record |= {f"{name}{suffix}{end}": value for end, value in ends.items()}
            record[f"{name}_kept"] = row.kept[metric].share if group == OWN_GROUP and metric in row.kept else None
        records.append(record)
    return pd.DataFrame(records)


def summarize_verdicts(experiments: list[ExperimentResults], briefs: list[Brief]) -> str:
    """Return how many variants have which verdict, with the names of a few; empty for fewer than two variants."""
    reference, *compared_experiments = experiments
    variants = {experiment.name for experiment in compared_experiments if not experiment.control}
    names: dict[str, list[str]] = {kind: [] for kind in VERDICTS}
    for brief in briefs:
        if brief.verdict.experiment in variants:
            names[brief.verdict.kind].append(brief.verdict.experiment)
    counts = [
        f"{len(variant_names)} {VERDICTS[kind]} ({_list_some(variant_names)})"
        for kind, variant_names in names.items()
        if variant_names
    ]
    if sum(map(len, names.values())) < 2:
        return ""
    return f"Compared with {reference.name}: {', '.join(counts)}."


def _list_some(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return join_words([*names[:MAX_NAMES], f"{more} more"] if more > 0 else names)


def page_notes(experiments: list[ExperimentResults]) -> list[str]:
    """Return sentences on scores that are not compared, and on the judge of captions."""
    reference, *variants = experiments
    obstacles = [text for variant in variants for text in describe_obstacles(variant, reference)]
    return obstacles + judge_notes(experiments)[:1]


def build_study_page(rows: list[Row], notes: list[str], study: ShownStudy, name: str) -> VariantsPage:
    """Return the page; the notes stand above the table."""
    reference, *variant_rows = rows
    experiments = [row.experiment for row in rows]
    scores = shown_scores(rows)
    counts = [
        column for column in COUNT_COLUMNS if column == "seconds" or len({row.counts.get(column) for row in rows}) > 1
    ]
    counts = [column for column in counts if any(row.counts.get(column) is not None for row in rows)]
    scales = {key: _scale(variant_rows, key) for key in scores}
    differences = sum(bool(find(row.differences, key)) for row in variant_rows for key in scores)
    return VariantsPage(
        study.page.title or name.replace("_", " "),
        [
            study.description,
            study.search.progress if study.search else "",
            *_introduction(rows, study),
            chance_note(differences, len(reference.experiment.runs) == 1),
            *notes,
        ],
        "Variant",
        [COUNT_COLUMNS[column][0] for column in counts],
        [(find_title(metric), GROUP_LABELS[group].lower()) for group, metric in scores],
        [
            VariantRow(
                row.name,
                [_count(row, reference, column) for column in counts],
                [_score(row, key, scales[key], study.page.keeps) for key in scores],
                describe_row(row, reference),
                reference=row is reference,
            )
            for row in rows
        ],
        zero_line=True,
        chart=cost_chart(rows),
        parallels=draw_parallels(study.search, find_headline(experiments)) if study.search else None,
        tables=_tables(experiments, study),
    )


def _tables(experiments: list[ExperimentResults], study: ShownStudy) -> list[PlainTable]:
    headline = find_headline(experiments)
    search = study.search
    of_search = []
    if search:
        of_search = [*trial_table(search, headline), *importance_table(search, headline), *price_table(search)]
    return [*of_search, *curve_table(experiments, headline), *proxy_table(experiments, headline, study.search)]


def cost_chart(rows: list[Row]) -> CostChart | None:
    """Return the headline against the time of each variant; None for fewer than three measured ones."""
    headline = find_headline([row.experiment for row in rows])
    key = headline.group, headline.metric
    candidates = [(row, row.counts.get("seconds"), find(row.experiment.groups, key)) for row in rows]
    measured = [(row, seconds, score) for row, seconds, score in candidates if seconds and score]
    if len(measured) < 3:
        return None
    times, ends = [seconds for _, seconds, _ in measured], [interval_ends(score) for _, _, score in measured]
    across = Scale(0, 1.05 * max(times))
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    lowest, highest = score_range(headline.metric)
    up = Scale(max(lowest, low - 0.05 * (high - low)), min(highest, high + 0.05 * (high - low)))
    points = [
        CostPoint(
            across.at(seconds),
            place_marker(up, score),
            f"{row.name}: {format_score(headline.metric, score['mean'])}, {format_duration(seconds)}",
            row is rows[0],
            not any(
                other_seconds < seconds and _is_better(other_score, score, headline.lower_is_better)
                for _, other_seconds, other_score in measured
            ),
        )
        for row, seconds, score in measured
    ]
    labels = [
        format_score(headline.metric, up.low),
        format_score(headline.metric, up.high),
        format_duration(across.high),
    ]
    return CostChart(headline.title, points, labels)


def _is_better(estimate: Estimate, other_estimate: Estimate, lower_is_better: bool) -> bool:
    return estimate["mean"] < other_estimate["mean"] if lower_is_better else estimate["mean"] > other_estimate["mean"]


def _introduction(rows: list[Row], study: ShownStudy) -> list[str]:
    reference, *variant_rows = rows
    seeds, keeps = len(reference.experiment.runs), study.page.keeps
    random = [row for row in variant_rows if row.experiment.control]
    return [
        f"Each row compares a variant with {reference.name}, the reference, trained with "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}.",
        "Differences are variant − reference, paired by seed and image, with 95 % intervals. A hollow dot means "
        "that no difference is shown.",
        *(
            f"{row.name} is trained on as many rows as {row.experiment.control.experiment}, drawn at random from those "
            "that the baseline's recipe keeps."
            for row in random
        ),
        f"A variant keeps {100 * keeps:g} % if the interval of (its score − {100 * keeps:g} % of the reference's "
        "score) is above 0; “not shown” means that the interval contains 0."
        if keeps
        else "",
        "Memory is the highest reading.",
        coverage_note(seeds),
    ]


def describe_row(row: Row, reference: Row) -> str:
    """Describe the settings of the reference, or those in which a variant differs from it, and its change of faults."""
    known = {} if row is reference else reference.experiment.changes
    changes = row.experiment.changes.items()
    texts = ["reference"] if row is reference else []
    texts += [f"{key} {_word(value)}" for key, value in changes if known.get(key, ...) != value and _word(value)]
    faults = {
        name.removeprefix(FAULTS).replace("_", " "): (value or 0) - (reference.counts.get(name) or 0)
        for name, value in row.counts.items()
        if name.startswith(FAULTS) and name not in COUNT_COLUMNS
    }
    kinds = sorted(faults, key=lambda kind: -abs(faults[kind]))
    if changed := ", ".join(f"{kind} {format_count(faults[kind], signed=True)}" for kind in kinds if faults[kind]):
        texts.append(f"faults: {changed}")
    return "; ".join(texts)


def _word(value: Any) -> str:
    """Return a setting's value in a few characters; empty for a whole section."""
    words = {True: "on", False: "off", None: "none"}
    if isinstance(value, dict):
        return ""
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _count(row: Row, reference: Row, name: str) -> CountCell:
    """Return a count or cost; below a count its difference from the reference's."""
    own_count, reference_count, show = row.counts.get(name), reference.counts.get(name), COUNT_COLUMNS[name][1]
    if own_count is None:
        return CountCell("–")
    changed = row is not reference and reference_count is not None and show is format_count
    return CountCell(show(own_count), format_count(own_count - reference_count, signed=True) if changed else "")


def _score(row: Row, key: tuple[str, str], scale: Scale, keeps: float | None) -> ScoreCell | None:
    """Return a score with its difference from the reference, on an axis that all variants share."""
    estimate, difference = find(row.experiment.groups, key), find(row.differences, key)
    if not estimate:
        return None
    metric = key[1]
    text, interval = format_score(metric, estimate["mean"]), format_interval(metric, estimate)
    if not difference:
        return ScoreCell(text, [interval])
    verdict = difference_verdict(metric, difference)
    change, ends = format_difference(metric, difference["mean"]), format_interval(metric, difference, format_difference)
    kept = row.kept.get(metric) if key[0] == OWN_GROUP else None
    lines = [f"{change}, {ends}"]
    lines += [f"{100 * kept.share:.1f} % kept, at least {100 * keeps:g} %: {KEPT_TEXTS[kept.enough]}"] if kept else []
    label = f"{verdict}: {change}, 95 % interval: {ends}"
    return ScoreCell(text, lines, VERDICT_CLASSES[verdict], place_marker(scale, difference), label)


def _scale(rows: list[Row], key: tuple[str, str]) -> Scale:
    """Return the axis of a score's differences, with 0 in the middle."""
    differences = [difference for row in rows if (difference := find(row.differences, key))]
    half = 1.05 * max((abs(end) for difference in differences for end in interval_ends(difference)), default=0.0) or 1.0
    return Scale(-half, half)
