"""Page of a dataset analysis: distribution, limits and example rows of each statistic."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from dj2mgm.data.images import load_image
from dj2mgm.features.analyze.analysis import Analysis, Statistic
from dj2mgm.juicer.filter_limits import FilterLimit, Limits
from dj2mgm.recipes.catalogue import label_statistic
from dj2mgm.reporting.charts import Bars, LimitMark, Scale, Tick, compute_bin_edges, scale_to_square_roots, stack_bars
from dj2mgm.reporting.rendering import (
    build_template_environment,
    encode_shrunk_image,
    format_integer,
    format_snakemake_command,
    list_counts,
)
from dj2mgm.storage.files import write_text

EXAMPLE_COUNT = 4
COMMON_SHARE = 0.25  # share of the rows; a lowest or highest value of more rows gets no examples
MAX_CAPTION_LENGTH = 90  # characters
MAX_SIDE = 144  # px, of embedded images


@dataclass(frozen=True)
class Example:
    """A row with its value of a statistic."""

    value: str
    caption: str
    image: str  # data URI; empty for a statistic of texts


@dataclass(frozen=True)
class Group:
    """Examples of one kind. If there are none, `words` gives the reason."""

    title: str
    dropped: bool
    examples: list[Example] = field(default_factory=list)
    words: str = ""


@dataclass(frozen=True)
class LimitRow:
    """A limit of the recipe."""

    argument: str
    value: str
    drops: int


@dataclass(frozen=True)
class StatisticPanel:
    """The section of one statistic."""

    name: str
    title: str
    operator: str
    in_recipe: bool
    words: str  # instead of bars, if all rows have one value
    range: str  # both limits, "38 to 528"; empty without limits
    drops: int
    limit_rows: list[LimitRow]
    bars: list[Bars] = field(default_factory=list)
    limits: list[LimitMark] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    log: bool = False
    groups: list[Group] = field(default_factory=list)


@dataclass(frozen=True)
class AnalysisCard:
    """The first screen of the page."""

    statement: str
    confidence: str
    cost: str
    plan: str  # the command that shows what a comparison needs
    next_step: str
    command: str


def write_card(analysis: Analysis, dataset: Path, chosen: dict[str, str]) -> AnalysisCard:
    """Return what the recipe keeps, how sure that is, and how to try other limits.

    Args:
        analysis: the analysis.
        dataset: folder of the dataset.
        chosen: dataset, model and recipe that are not the defaults.
    """
    return AnalysisCard(
        f"The recipe's limits keep {format_integer(analysis.rows_kept)} distinct rows of "
        f"{format_integer(analysis.rows_in)}.",
        "Every row was measured, but operators that edit or select rows were not run. Only a comparison of trained "
        "models shows whether a limit helps.",
        "Nothing was trained. This command shows what a comparison needs:",
        format_snakemake_command("plan", chosen),
        "Check the examples below, then change a limit in a copy of the recipe, or keep a share of the rows with "
        "keep_fraction. This command shows all rows, with a slider for each limit:",
        f"python workflow_scripts/explore.py {shlex.quote(str(dataset))}",
    )


def write_analysis_page(analysis: Analysis, path: Path, chosen: dict[str, str], doubt: str = "") -> None:
    """Write one self-contained HTML file without scripts; its commands have the settings in `chosen`.

    `doubt` is a sentence about the similarities, or empty.
    """
    panels = [build_panel(statistic, analysis) for statistic in analysis.statistics]
    templates = build_template_environment(Path(__file__).parent)
    templates.filters["share"] = partial(format_share, total=analysis.rows)
    page = templates.get_template("analysis.html.j2").render(
        data=analysis.data,
        rows_in=analysis.rows_in,
        rows=analysis.rows,
        unreadable=len(analysis.unreadable),
        reasons=list_counts(Counter(analysis.unreadable.values())),
        repeats={name: int(rows.sum()) for name, rows in analysis.repeats.items()},
        kept=analysis.rows_kept,
        card=write_card(analysis, path.parents[1], chosen),
        panels=panels,
        doubt=doubt,
        not_measured=analysis.not_measured,
    )
    write_text(path, page)


def format_share(rows: int, total: int) -> str:
    """Format a share as "2.0 %", or as "< 0.1 %" if it is small but not 0."""
    if 0 < rows < 0.0005 * total:
        return "< 0.1 %"
    return f"{100 * rows / total:.1f} %"


def build_panel(statistic: Statistic, analysis: Analysis) -> StatisticPanel:
    """Return the section of a statistic; without a histogram if all rows have the same value."""
    finite = statistic.finite
    is_constant = finite.min() == finite.max()
    values = dict(
        name=statistic.name,
        title=label_statistic(statistic.name),
        operator=statistic.operator,
        in_recipe=statistic.in_recipe,
        words=f"All rows have {format_statistic(finite[0])}." if is_constant else "",
        range=_format_limits(statistic.limits),
        drops=int(statistic.dropped.sum()),
        limit_rows=[
            LimitRow(limit.argument, _format_limit(limit), int(limit.drops(statistic.values).sum()))
            for limit in statistic.limits.values()
        ],
    )
    if is_constant:
        return StatisticPanel(**values)
    edges, log = compute_bin_edges(finite)
    scale = Scale(edges[0], edges[-1], log)
    return StatisticPanel(
        **values,
        bars=_draw_bars(statistic, edges),
        limits=[
            LimitMark(scale.locate(limit.value), limit.side)
            for limit in statistic.limits.values()
            if edges[0] < limit.value < edges[-1]
        ],
        ticks=scale.choose_ticks(5),
        log=log,
        groups=[_build_group(*group, statistic, analysis) for group in _find_groups(statistic, analysis)],
    )


def _format_limits(limits: Limits) -> str:
    """Format limits as "38 to 528", or "from 38" if there is only one."""
    ends = {side: _format_limit(limit) for side, limit in limits.items() if not limit.unlimited}
    if len(ends) == 2:
        return f"{ends['min']} to {ends['max']}"
    return "".join(f"{'from' if side == 'min' else 'to'} {end}" for side, end in ends.items())


def _format_limit(limit: FilterLimit) -> str:
    return "no limit" if limit.unlimited else str(limit.written)


def _draw_bars(statistic: Statistic, edges: np.ndarray) -> list[Bars]:
    """Draw bars with the square roots of the numbers of rows, so that small groups are visible."""
    dropped = statistic.dropped[np.isfinite(statistic.values)]
    dropped_counts, kept_counts = (np.histogram(statistic.finite[rows], edges)[0] for rows in (dropped, ~dropped))
    highest = int((dropped_counts + kept_counts).max())
    return stack_bars(scale_to_square_roots({"kept": kept_counts, "here": dropped_counts}, highest), highest)


def _find_groups(statistic: Statistic, analysis: Analysis) -> Iterator[tuple[str, np.ndarray]]:
    """Return (title, rows) of the lowest and highest values and of values next to a limit, nearest first."""
    values = statistic.values
    order = np.argsort(values, kind="stable")
    order = order[np.isfinite(values[order]) & ~analysis.repeated[order]]
    yield "lowest", order
    for side, limit in statistic.limits.items():
        dropped = limit.drops(values[order])
        if dropped.any():
            below, above = (order[dropped], order[~dropped]) if side == "min" else (order[~dropped], order[dropped])
            yield f"just below {limit.written}", below[::-1]
            yield f"just above {limit.written}", above
    yield "highest", order[::-1]


def _build_group(title: str, rows: np.ndarray, statistic: Statistic, analysis: Analysis) -> Group:
    values = statistic.values
    dropped = bool(len(rows)) and bool(statistic.dropped[rows[0]])
    is_extreme = title in ("lowest", "highest")
    count = int((values == values[rows[0]]).sum()) if len(rows) else 0
    if is_extreme and count > COMMON_SHARE * analysis.rows:
        return Group(title, dropped, words=f"{format_integer(count)} rows have {format_statistic(values[rows[0]])}")
    examples = [_build_example(row, statistic, analysis) for row in _select_different(rows, statistic, analysis)]
    return Group(title, dropped, examples)


def _select_different(rows: Iterable[int], statistic: Statistic, analysis: Analysis) -> list[int]:
    """Return the first rows with different images or, for a statistic of texts, different texts."""
    first_rows: dict[object, int] = {}  # by image or text
    for row in rows:
        if len(first_rows) == EXAMPLE_COUNT:
            break
        first_rows.setdefault(row if statistic.of_images else analysis.captions[row], int(row))
    return list(first_rows.values())


def _build_example(row: int, statistic: Statistic, analysis: Analysis) -> Example:
    caption = analysis.captions[row]
    if len(caption) > MAX_CAPTION_LENGTH:
        caption = caption[:MAX_CAPTION_LENGTH] + "…"
    image = encode_shrunk_image(load_image(analysis.images[row][0]), MAX_SIDE) if statistic.of_images else ""
    return Example(format_statistic(statistic.values[row]), caption, image)


def format_statistic(value: float) -> str:
    """Return whole numbers below a million in full, and others with three digits."""
    return str(int(value)) if abs(value) < 1e6 and value == int(value) else f"{value:.3g}"
