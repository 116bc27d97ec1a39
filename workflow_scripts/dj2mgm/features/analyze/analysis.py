"""The analysis of a dataset: every statistic of every row, and the rows that each limit of a recipe would drop.

The engine runs the recipe's filters and deduplicators, but they only measure and count. Rows whose image cannot be read
are dropped and counted. Mappers and selectors are not run, since they would change the measured data.
analysis_page.py makes the page.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from data_juicer.analysis import OverallAnalysis
from data_juicer.ops.base_op import Deduplicator
from datasets import Json

from dj2mgm.data.formats import extract_caption
from dj2mgm.data.images import BadImageError
from dj2mgm.data.score_limits import SIDE_BY_SHARE, compute_score_limits
from dj2mgm.errors import InputError
from dj2mgm.juicer.engine import Engine, check_installed
from dj2mgm.juicer.filter_limits import FilterLimit, Limits, NoRowsKeptError, read_statistic_limits
from dj2mgm.juicer.operators.batched_image_text_similarity_filter import NAME as SIMILARITY
from dj2mgm.juicer.operators.declarations import SelectionFilter, get_declarations
from dj2mgm.juicer.operators.image_file_operators import IMAGE_TEXT, INTEGRITY_FILTER
from dj2mgm.juicer.partitions import iterate_column_values, iterate_output_stats, join_traces
from dj2mgm.juicer.patched_data_juicer import OP, OPERATORS, Fields, Filter, __version__
from dj2mgm.juicer.recipe_settings import SIMILARITY_FILTERS, RecipeSettings
from dj2mgm.juicer.run_recipe import compute_recipe_fingerprint, open_working_folder
from dj2mgm.recipes.recipe_parsing import RecipeStep
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_jsonl, write_text

STATS, OVERALL, PAGE, SUMMARY = "stats.jsonl", "overall.csv", "analysis.html", "summary.json"
TRACE = "trace.jsonl"  # file in the working folder
PERCENTILES = [0.01, 0.05, 0.95, 0.99]  # in addition to Data-Juicer's own 25, 50 and 75 %
EDITS_ROWS = "edits or selects rows; the analysis does not change the data"
NO_STATISTIC = "computes no statistic in addition to those of earlier operators"


@dataclass(frozen=True)
class Statistic:
    """The values of a Data-Juicer statistic over all rows."""

    name: str
    operator: str
    values: np.ndarray  # (N,) float64, NaN where a row has none
    of_images: bool  # one number per image, rather than per text
    in_recipe: bool  # False if only the analysis has added the operator
    limits: Limits  # limits that the recipe applies; none if the operator is not in it

    @property
    def finite(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]

    @property
    def dropped(self) -> np.ndarray:
        """The rows that the limits drop, (N,) bool."""
        dropped = np.zeros(len(self.values), dtype=bool)
        for limit in self.limits.values():
            dropped |= limit.drops(self.values)
        return dropped


@dataclass
class Analysis:
    """The measurements of a dataset. Columns and statistics cover the rows whose image can be read, in their order."""

    data: Path
    rows_in: int
    steps: list[RecipeStep]  # operators of the recipe and of the analysis
    recipe: set[str]  # names of the recipe's operators
    unreadable: dict[str, str] = field(default_factory=dict)  # reason by id
    captions: list[str] = field(default_factory=list)
    images: list[list[str]] = field(default_factory=list)  # absolute paths
    statistics: list[Statistic] = field(default_factory=list)
    repeats: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) bool by deduplicator: equals an earlier row
    not_measured: dict[str, str] = field(default_factory=dict)  # reason by operator

    @property
    def rows(self) -> int:
        return len(self.captions)

    @property
    def repeated(self) -> np.ndarray:
        """Rows that any deduplicator would drop, (N,) bool."""
        return np.any(list(self.repeats.values()), axis=0)

    @property
    def rows_kept(self) -> int:
        """Number of rows that all deduplicators and all limits of the recipe keep."""
        return int((~np.any([self.repeated, *(statistic.dropped for statistic in self.statistics)], axis=0)).sum())


def analyze(settings: RecipeSettings, clip: str | None, data: Path, output_dir: Path) -> Analysis:
    """Measure `data`; write stats.jsonl and overall.csv into `output_dir`.

    As in the filter stage, the next run continues after a kill. Ray is not used.

    Args:
        clip: folder or hub id of the CLIP that rates captions. With None the similarity is measured only if the recipe
            has a similarity filter.

    Raises:
        InputError: a row or the recipe is invalid, an operator fails, no image can be read, or there is nothing to
            measure. Then there is no output, not even of an earlier run.
    """
    for name in (STATS, OVERALL, PAGE, SUMMARY):
        (output_dir / name).unlink(missing_ok=True)
    check_installed(settings.steps)
    steps = _add_needed(settings.steps, clip)
    measuring_steps = settings.complete(step for step in steps if _measures_rows(step))
    with open_working_folder(output_dir, compute_recipe_fingerprint(measuring_steps, settings, data)) as working:
        engine = Engine(measuring_steps, replace(settings, executor="default", gpus=1), working, only_measures=True)
        _run(engine, clip, data)
        join_traces(engine.folders, len(measuring_steps), working / TRACE)
        analysis = Analysis(data, engine.rows_in, steps, {step.name for step in settings.steps})
        stats = list(_read_stats(engine))
        _describe(analysis, engine, stats, list(read_jsonl(working / TRACE)))
        reason = get_declarations(engine.operators[0]).unreadable_stat
        unreadable = ({"id": identifier, reason: problem} for identifier, problem in analysis.unreadable.items())
        write_jsonl(output_dir / STATS, [*stats, *unreadable])
        write_text(output_dir / OVERALL, _tabulate_statistics(stats, {"id", reason}, working).to_csv())
    return analysis


def _find_class(step: RecipeStep) -> type[OP]:
    return OPERATORS.modules[step.name]


def _measures_rows(step: RecipeStep) -> bool:
    """Return whether the operator only measures rows, and then decides about each of them."""
    return issubclass(_find_class(step), Filter | Deduplicator) and not issubclass(_find_class(step), SelectionFilter)


def _add_needed(steps: Sequence[RecipeStep], clip: str | None) -> list[RecipeStep]:
    """Return the recipe with a check of images first, a deduplicator, and the similarity filter if there is a CLIP."""
    checks = [step for step in steps if get_declarations(_find_class(step)).unreadable_stat]
    steps = (checks or [_build_added_step(INTEGRITY_FILTER)])[:1] + [step for step in steps if step not in checks]
    if not any(issubclass(_find_class(step), Deduplicator) for step in steps):
        steps.append(_build_added_step(IMAGE_TEXT))
    if clip is not None and not any(step.name in SIMILARITY_FILTERS for step in steps):
        steps.append(_build_added_step(SIMILARITY))
    return steps


def _build_added_step(name: str) -> RecipeStep:
    return RecipeStep("analysis", name, {})


def _run(engine: Engine, clip: str | None, data: Path) -> None:
    try:
        engine.run(data)
    except InputError as error:
        if clip is not None and clip in str(error):
            raise InputError(f"{error} (here as model.clip)") from None
        raise
    if not engine.rows_out:
        reasons = ", ".join(f"{reason} {count}" for reason, count in engine.counts[1]["report"].items())
        [(first, *_)] = next(iterate_column_values(engine.folders[0], "images"))
        raise NoRowsKeptError(
            f"{data}: none of {engine.rows_in} images can be read ({reasons}); the first is {first}. Check that "
            "'image_root' is the folder that its image paths are relative to"
        )


def _read_stats(engine: Engine) -> Iterator[dict]:
    """Yield each row's id and stats with ten digits, as Data-Juicer's datasets and its own analysis have them."""
    codec = Json()
    for row in iterate_output_stats(engine.folders[-1]):
        yield codec.decode_example(codec.encode_example(row))


def _describe(analysis: Analysis, engine: Engine, stats: list[dict], trace: list[dict]) -> None:
    """Fill in the measurements of a finished engine.

    `stats` are the statistics of the readable rows. `trace` has the unreadable rows and the repeats.
    """
    for text, images in iterate_column_values(engine.folders[-1], "text", "images"):
        analysis.captions.append(extract_caption(text))
        analysis.images.append(images)
    reason = get_declarations(engine.operators[0]).unreadable_stat
    analysis.unreadable = {row["id"]: row["stats"][reason] for row in trace if row["event"] == "dropped"}
    _describe_operators(analysis, engine, stats, trace)
    if not analysis.statistics:
        raise NoRowsKeptError(
            "there is nothing to analyze: no filter of the recipe computes a number. Name a recipe with such filters, "
            "for example config/recipes/baseline.yaml, or a CLIP as model.clip"
        )


def _describe_operators(analysis: Analysis, engine: Engine, stats: list[dict], trace: list[dict]) -> None:
    """Add the statistics of filters, the repeated rows of deduplicators, and the operators without a measurement."""
    filters, number = [], 0
    for step in analysis.steps:
        name = step.name
        if not _measures_rows(step):
            analysis.not_measured[name] = EDITS_ROWS
            continue
        number += 1
        if issubclass(_find_class(step), Deduplicator):
            repeated = {row["id"] for row in trace if row["event"] == "repeated" and row["step"] == number}
            analysis.repeats[name] = np.array([row["id"] in repeated for row in stats])
        elif not engine.counts[number]["statistics"]:
            analysis.not_measured[name] = NO_STATISTIC
        elif not get_declarations(_find_class(step)).unreadable_stat:
            filters.append((engine.operators[number - 1], step.arguments, list(engine.counts[number]["statistics"])))
    for operator, arguments, names in filters:
        _describe_filter(analysis, operator, arguments, {name: [row.get(name) for row in stats] for name in names})


def _describe_filter(analysis: Analysis, operator: OP, arguments: dict, columns: dict[str, list]) -> None:
    """Fill in the statistics that one filter has computed; `columns` has the values of all rows by statistic."""
    in_recipe = operator._name in analysis.recipe
    for name, column in columns.items():
        numbers = convert_to_numbers(column)
        if numbers is None:
            analysis.not_measured[f"{operator._name}, {name}"] = "is not numeric"
            continue
        limits = {}
        if in_recipe:
            limits = read_statistic_limits(operator, arguments, name, alone=len(columns) == 1)
            limits |= find_share_limits(numbers[0], arguments)
        analysis.statistics.append(Statistic(name, operator._name, *numbers, in_recipe, limits))


def convert_to_numbers(column: list) -> tuple[np.ndarray, bool] | None:
    """Return a column as (N,) float64 and whether it has one number per image, or None if it is not numeric."""
    per_image = any(isinstance(value, list) for value in column)
    single = [(value[0] if len(value) == 1 else None) if isinstance(value, list) else value for value in column]
    if any(isinstance(value, str | bool | list | dict) for value in single):
        return None
    values = np.array([np.nan if value is None else value for value in single], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return None if np.isnan(values).all() else (values, per_image)


def find_share_limits(values: np.ndarray, arguments: dict) -> Limits:
    """Return the limits that the shares and quantiles in `arguments` set for these values."""
    shares = {name: arguments[name] for name in SIDE_BY_SHARE if arguments.get(name) is not None}
    limits = compute_score_limits(values[np.isfinite(values)], **shares)
    return {
        SIDE_BY_SHARE[name]: FilterLimit(SIDE_BY_SHARE[name], name, limits[SIDE_BY_SHARE[name]], share)
        for name, share in shares.items()
    }


def _tabulate_statistics(stats: list[dict], others: set[str], working: Path) -> pd.DataFrame:
    """Return Data-Juicer's own table with count, mean, deviation, extremes and percentiles of every statistic.

    `others` are keys of a row that are not statistics.
    """
    stats = [{name: value for name, value in row.items() if name not in others} for row in stats]
    analysis = OverallAnalysis({Fields.stats: stats, Fields.meta: [{}] * len(stats)}, str(working))
    return analysis.analyze(percentiles=PERCENTILES, skip_export=True)


def summarize_analysis(analysis: Analysis, clip: str | None) -> dict:
    """Return the summary; raise RuntimeError unless rows in = unreadable + analyzed."""
    unreadable = Counter(analysis.unreadable.values())
    if analysis.rows_in != analysis.rows + sum(unreadable.values()):
        raise RuntimeError(
            f"of {analysis.rows_in} rows, {analysis.rows} are readable and {len(analysis.unreadable)} are unreadable"
        )
    return {
        "rows_in": analysis.rows_in,
        "unreadable_images": {reason: unreadable[reason] for reason in BadImageError.REASONS},
        "rows_analyzed": analysis.rows,
        "repeats": {name: int(rows.sum()) for name, rows in analysis.repeats.items()},
        "rows_kept": analysis.rows_kept,
        "statistics": {statistic.name: _summarize(statistic) for statistic in analysis.statistics},
        "not_measured": analysis.not_measured,
        "clip": clip,
        "data_juicer": __version__,
        "input": {"path": str(analysis.data), "sha256": compute_sha256(analysis.data)},
    }


def _summarize(statistic: Statistic) -> dict:
    """Return the limits of a statistic with the number of rows that each drops, as JSON values."""
    return {
        "operator": statistic.operator,
        "in_recipe": statistic.in_recipe,
        "rows": len(statistic.finite),
        "limits": {
            limit.argument: {"limit": limit.written, "drops": int(limit.drops(statistic.values).sum())}
            for limit in statistic.limits.values()
        },
    }
