"""Histograms of all statistics, over the rows that a stage kept and dropped."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dj2mgm.recipes.catalogue import label_statistic, read_statistic_operators
from dj2mgm.reporting.charts import (
    HISTOGRAM_BINS,
    Bars,
    LimitMark,
    Scale,
    Tick,
    compute_bin_edges,
    scale_to_square_roots,
    stack_bars,
)
from dj2mgm.reporting.experiment_results import RunResults
from dj2mgm.reporting.rendering import list_counts
from dj2mgm.reporting.row_flow import RecaptionedRow
from dj2mgm.storage.files import read_jsonl

BYTES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
SERIES = ("kept", "here", "elsewhere")  # from the bottom: kept, dropped by this operator, dropped by another one


@dataclass(frozen=True)
class Histogram:
    """A histogram of one statistic; no bars, but `words`, if all values are equal or are strings."""

    title: str
    operator: str
    limits_text: str  # "38 to 528"; empty if the recipe sets none
    counts: dict[str, int]  # rows by series
    words: str = ""  # "ok 9 800, undecodable 200", or the one value of all rows
    bars: list[Bars] = field(default_factory=list)
    limits: list[LimitMark] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    log: bool = False
    number: int | None = None  # the operator's position in the recipe


def build_statistic_histograms(folder: Path, recipe: dict, leave_out: Iterable[str] = ()) -> list[Histogram]:
    """Draw the statistics in a stage's stats.jsonl and dropped.jsonl, in the order of the recipe."""
    steps = [(name, step[name] or {}) for step in recipe["process"] for name in step]
    values = read_statistics(folder)
    histograms = [
        _build_histogram(name, rows, *_find_limits(name, steps))
        for name, rows in values.items()
        if name not in set(leave_out)
    ]
    numbers = {name.removeprefix("batched_"): number for number, (name, _) in enumerate(steps, start=1)}
    return [
        replace(histogram, number=numbers.get(histogram.operator.removeprefix("batched_"))) for histogram in histograms
    ]


def read_statistics(folder: Path) -> dict[str, list[tuple[str, object]]]:
    """Read the values of each statistic by name, each with the operator that dropped its row, or ""."""
    values: dict[str, list[tuple[str, object]]] = {}

    def add(stats: dict, dropped_by: str) -> None:
        for name, value in stats.items():
            for item in value if isinstance(value, list) else [value]:
                if item is not None and not (isinstance(item, float) and math.isnan(item)):
                    values.setdefault(name, []).append((dropped_by, item))

    for row in read_jsonl(folder / "stats.jsonl"):
        add({name: value for name, value in row.items() if name != "id"}, "")
    for row in read_jsonl(folder / "dropped.jsonl"):
        if row["event"] == "dropped":
            add(row["stats"], row["operator"])
    plain = (str, int, float)
    return {name: rows for name, rows in values.items() if all(isinstance(value, plain) for _, value in rows)}


def _find_limits(statistic: str, steps: list[tuple[str, dict]]) -> tuple[str, float | None, float | None, str]:
    """Return (operator, lower limit, upper limit, both as text) of the recipe's last operator on the statistic."""
    operator, limit_arguments = read_statistic_operators().get(
        statistic, (statistic.removesuffix("_score") + "_filter", {})
    )
    operator_steps = [(name, arguments) for name, arguments in steps if name.removeprefix("batched_") == operator]
    if not operator_steps:
        return operator, None, None, ""
    operator, arguments = operator_steps[-1]
    names = [limit_arguments.get(side) for side in ("min", "max")]
    texts = [str(arguments[name]) if name in arguments else None for name in names]
    low, high = (None if text is None else parse_number(text) for text in texts)
    if texts == [None, None]:
        return operator, None, None, ""
    if None not in texts:
        return operator, low, high, f"{texts[0]} to {texts[1]}"
    return operator, low, high, f"at least {texts[0]}" if texts[0] is not None else f"at most {texts[1]}"


def parse_number(text: str) -> float | None:
    """Read "0.5" as 0.5 and "20MiB" as 20971520.0; None if the text is not a number."""
    digits = text.rstrip("iIbBkKmMgGtT ")
    try:
        return float(digits) * BYTES.get(text[len(digits) :].strip().lower(), 1)
    except ValueError:
        return None


def _build_histogram(
    name: str, rows: list[tuple[str, object]], operator: str, low: float | None, high: float | None, text: str
) -> Histogram:
    """Return bars and limits; texts and constant values have counts instead."""
    title = label_statistic(name)
    groups: dict[str, list] = {series: [] for series in SERIES}
    for dropped_by, value in rows:
        groups[_find_series(dropped_by, operator)].append(value)
    counts = {series: len(values) for series, values in groups.items()}
    if any(isinstance(value, str) for _, value in rows):
        return Histogram(title, operator, text, counts, list_counts(Counter(str(value) for _, value in rows)))
    arrays = {series: np.array(values, dtype=np.float64) for series, values in groups.items()}
    all_values = np.concatenate(list(arrays.values()))
    if all_values.min() == all_values.max():
        return Histogram(title, operator, text, counts, f"all {all_values[0]:g}")
    edges, log = compute_bin_edges(all_values)
    scale = Scale(edges[0], edges[-1], log)
    sides = ((low, "min"), (high, "max"))
    inner_limits = [(limit, side) for limit, side in sides if limit is not None and edges[0] < limit < edges[-1]]
    limits = [LimitMark(scale.locate(limit), side) for limit, side in inner_limits]
    rows_in_bins = {series: np.histogram(values, edges)[0] for series, values in arrays.items()}
    bars = stack_bars(rows_in_bins, highest=int(sum(rows_in_bins.values()).max()))
    return Histogram(title, operator, text, counts, "", bars, limits, scale.choose_ticks(3), log)


def _find_series(dropped_by: str, operator: str) -> str:
    if not dropped_by:
        return "kept"
    return "here" if dropped_by == operator else "elsewhere"


@dataclass(frozen=True)
class Similarities:
    """Histogram of image–text similarity before (bars up) and after recaptioning (bars down).

    Heights are square roots of the number of rows, because most rows are in a few bins.
    """

    before: list[Bars]  # series: kept and replaced captions
    after: list[Bars]  # series: kept captions, accepted and rejected new captions
    ticks: list[Tick]
    limit: float | None  # percent of the axis; None if there is none on the axis
    limit_text: str
    counts: dict[str, int]


def build_similarity_histogram(run: RunResults, recaptions: list[RecaptionedRow]) -> Similarities | None:
    """Draw the similarities; None if no row was recaptioned. Rows without a usable new caption count as replaced."""
    if not recaptions:
        return None
    recaptioned_ids = {recaption.id for recaption in recaptions}
    stats = read_jsonl(run.stages["synthesize"] / "stats.jsonl")
    scores = {row["id"]: row.get("image_text_similarity") for row in stats}
    values = {
        "kept": [score[0] for name, score in scores.items() if score and name not in recaptioned_ids],
        "replaced": [recaption.original_similarity for recaption in recaptions],
        "accepted": [recaption.similarity for recaption in recaptions if recaption.accepted],
        "rejected": [r.similarity for r in recaptions if r.similarity is not None and not r.accepted],
    }
    all_values = [value for numbers in values.values() for value in numbers]
    records = [operator.reports.get("recaption") for operator in run.synthesize.operators]
    limit = next((record["min_similarity"] for record in records if record), None)
    edges = align_bin_edges(min(all_values), max(all_values), limit)
    counts = {name: np.histogram(numbers, edges)[0] for name, numbers in values.items()}
    scale = Scale(edges[0], edges[-1])
    sides = {"before": ("kept", "replaced"), "after": ("kept", "accepted", "rejected")}
    highest = max(int(sum(counts[name] for name in names).max()) for names in sides.values())
    before, after = (
        stack_bars(
            scale_to_square_roots({name: counts[name] for name in names}, highest), highest, down=side == "after"
        )
        for side, names in sides.items()
    )
    limit_position = scale.locate(limit) if limit is not None and edges[0] <= limit <= edges[-1] else None
    sizes = {name: len(numbers) for name, numbers in values.items()}
    return Similarities(
        before, after, scale.choose_ticks(5), limit_position, "" if limit is None else f"{limit:.3g}", sizes
    )


def align_bin_edges(low: float, high: float, limit: float | None) -> np.ndarray:
    """Return the edges of the bins; the limit is one of them, so that no bin has rows of both sides."""
    width = (high - low) / (2 * HISTOGRAM_BINS) or 1.0
    start = low if limit is None else limit
    return start + width * np.arange(np.floor((low - start) / width), np.ceil((high - start) / width + 1e-9) + 1)
