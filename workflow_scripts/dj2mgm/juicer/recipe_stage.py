"""Runs a stage's recipe on a dataset; writes kept rows, their stats, a trace, and a summary that adds up.

A recipe that keeps no row ends with an error about the operator that dropped most, its values, and limits that keep
some.
"""

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
from loguru import logger

from dj2mgm.cli.messages import WARNING
from dj2mgm.data.images import BadImage, UnreadableImages
from dj2mgm.errors import InputError
from dj2mgm.juicer import changed_data_juicer, engine
from dj2mgm.juicer.changed_data_juicer import OP, Fields
from dj2mgm.juicer.engine import Engine
from dj2mgm.juicer.operators.declarations import decision_method, declared, find_model_files
from dj2mgm.juicer.partitions import column_values, join_traces, output_rows, output_stats
from dj2mgm.juicer.recipe import check_installed
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.statistics import read_statistic_limits
from dj2mgm.recipes.recipe_parsing import (
    DATASET_FILES,
    INSTRUCTIONS,
    RecipeStep,
    check_models_named,
    find_recipe_files,
)
from dj2mgm.script_modules import find_modules
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_json, write_jsonl

WORKING = ".data_juicer-"


class EmptyResult(InputError):
    """The error for a recipe that has run to its end without a row to write."""


def fingerprint(steps: Sequence[RecipeStep], settings: RecipeSettings, data: Path) -> str:
    """Return a digest of everything that a stage's unfinished work depends on.

    These are data, files of the dataset, recipe, models, and the code of the engine and the modules that it imports,
    including operators. The executor does not matter.
    """
    process = [step.as_dict() for step in steps]
    dataset = [step.arguments[name] for step in steps for name in DATASET_FILES if step.arguments.get(name)]
    files = sorted({*find_model_files(process), *map(Path, find_recipe_files(process)), *map(Path, dataset)})
    code = compute_sha256(*find_modules(Path(engine.__file__)))
    read = [compute_sha256(file) for file in files]
    parts = [process, str(settings.image_root), compute_sha256(data), read, code, changed_data_juicer.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def working_folder(output_dir: Path, fingerprint: str) -> Iterator[Path]:
    """Make a folder inside `output_dir`, and remove it at the end.

    A run that fails or is killed leaves it, and the next run with the same fingerprint continues there. Folders of
    other fingerprints are removed first.
    """
    output_dir = output_dir.resolve()
    working = output_dir / f"{WORKING}{fingerprint[:16]}"
    for folder in output_dir.glob(f"{WORKING}*"):
        if folder != working:
            shutil.rmtree(folder)
    working.mkdir(parents=True, exist_ok=True)
    finished = False
    try:
        yield working
        finished = True
    except EmptyResult:
        finished = True  # the user may correct the images now, so the next run must read them again
        raise
    finally:
        if finished:
            shutil.rmtree(working, ignore_errors=True)


KEPT_SHARES = (0.1, 0.25, 0.5)  # approximate shares that the suggested limits would keep
DIGITS = 3


class ReadTracker(dict):
    """A row's stats that record which names have been read."""

    def __init__(self, stats: dict):
        super().__init__(stats)
        self.read: set[str] = set()

    def __getitem__(self, key: str):
        self.read.add(key)
        return super().__getitem__(key)


def empty_result(rows_in: int, steps: list[dict], operators: list[OP], trace: Path, rows: Path) -> EmptyResult:
    """Return the error to raise if the last of the finished steps kept no row.

    `trace` is the jsonl of dropped rows, which are all rows; `rows` are the partitions of the stage's input.
    """
    worst = max(steps, key=lambda step: step["dropped"])
    if stat := declared(operators[worst["step"] - 1]).unreadable_stat:
        return EmptyResult(
            f"the recipe kept none of {rows_in} rows; the images of {worst['dropped']} cannot be read "
            f"({_unreadable(stat, worst['step'], trace, rows)}). Correct the paths, or the folder that they are "
            "relative to"
        )
    return EmptyResult(
        f"the recipe kept none of {rows_in} rows; {worst['operator']} (step {worst['step']}) dropped most, "
        f"{worst['dropped']} of {worst['rows_in']}"
        f"{_distribution(operators[worst['step'] - 1], _stats_at(trace, worst['step']))}. "
        "Widen its limits in the recipe, or correct the data"
    )


def _unreadable(stat: str, step: int, trace: Path, rows: Path) -> UnreadableImages:
    """Count the rows that a step dropped by the reason in their stat."""
    dropped = (row for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] == step)
    reasons = {row["id"]: row["stats"][stat] for row in dropped}
    found = UnreadableImages()
    for identifier, images in column_values(rows, "id", "images"):
        if identifier in reasons:
            found.add(reasons[identifier], images[0])
    return found


def _stats_at(trace: Path, step: int) -> list[dict]:
    """Return the stats of every row that reached a step; all were dropped there or later."""
    return [row["stats"] for row in read_jsonl(trace) if row["event"] == "dropped" and row["step"] >= step]


def _distribution(operator: OP, stats: list[dict]) -> str:
    """Return ` (image_text_similarity: lowest …; min_score 0.1 would keep 12 %, …)` for a filter with one statistic."""
    key = _judged_by(operator, stats)
    values = np.array(list(_numbers(stats, key)) if key else [])
    if not len(values):
        return ""
    text = f"{key}: lowest {_show(values.min())}, median {_show(np.median(values))}, highest {_show(values.max())}"
    limits = [f"{limit} would keep {share:.0%}" for limit, share in _limits(operator, key, values)]
    return f" ({'; '.join([text, ', '.join(limits)] if limits else [text])})"


def _judged_by(operator: OP, stats: list[dict]) -> str | None:
    """Return the stat by which a filter decides; None if there are several, or if the operator is not a filter."""
    decide = decision_method(operator)
    for row in stats if decide else ():
        tracker = ReadTracker(row)
        list(decide({Fields.stats: [tracker]}))
        if tracker.read:
            return tracker.read.pop() if len(tracker.read) == 1 else None
    return None


def _numbers(stats: list[dict], key: str) -> Iterator[float]:
    for row in stats:
        value = row.get(key)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _limits(operator: OP, statistic: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield (limit, share that it keeps) for increasing shares, on the side on which most rows were dropped."""
    limits = read_statistic_limits(operator, None, statistic, alone=True).values()
    dropped = {limit: int(limit.drops(values).sum()) for limit in limits}
    if not any(dropped.values()):
        return
    judged = max(dropped, key=dropped.get)  # the lower one of two that drop equally many
    name, sign = judged.argument, 1 if judged.side == "min" else -1
    seen = set()
    for share in KEPT_SHARES:
        limit = sign * _rounded_down(np.quantile(sign * values, 1 - share))
        if limit not in seen:
            seen.add(limit)
            yield f"{name} {_show(limit)}", float(np.mean(sign * values >= sign * limit))


def _rounded_down(value: float) -> float:
    step = 10.0 ** (np.floor(np.log10(abs(value))) - DIGITS + 1) if value else 1.0
    return float(np.floor(value / step) * step)


def _show(value: float) -> str:
    return f"{value:.{DIGITS}g}"


FILTERED, SYNTHESIZED = "filtered.jsonl", "synthesized.jsonl"
STATS, TRACE, SUMMARY = "stats.jsonl", "dropped.jsonl", "summary.json"


def run_recipe(settings: RecipeSettings, data: Path, output_dir: Path, rows_file: str) -> dict:
    """Run the recipe on `data` and write the four outputs into `output_dir`; return the summary.

    A folder inside `output_dir` keeps finished partitions while the stage runs. After a kill, the next run continues
    there if data, recipe, models and code are still the same. It does not read images again. After an InputError (an
    invalid row or recipe, a failing operator, no row kept) there is no output.

    `rows_file` is the name of the output with the kept rows.
    """
    steps = settings.complete(settings.steps)
    check_installed(steps)
    check_models_named(steps)
    for name in (rows_file, STATS, TRACE, SUMMARY):
        (output_dir / name).unlink(missing_ok=True)
    with working_folder(output_dir, fingerprint(steps, settings, data)) as working:
        engine = Engine(steps, settings, working)
        engine.run(data)
        join_traces(engine.folders, len(steps), working / TRACE)
        if not engine.rows_out:
            raise empty_result(engine.rows_in, engine.summaries, engine.operators, working / TRACE, engine.folders[0])
        kept = write_jsonl(output_dir / rows_file, output_rows(engine.folders[-1], settings.image_root))
        write_jsonl(output_dir / STATS, output_stats(engine.folders[-1]))
        os.replace(working / TRACE, output_dir / TRACE)
        summary = _summary(data, engine.rows_in, kept, engine.summaries, _count_events(output_dir / TRACE))
        summary |= {"rows": settings.rows} if settings.rows == INSTRUCTIONS else {}
    write_json(output_dir / SUMMARY, summary)
    return summary


def configure_log() -> None:
    """Configure loguru, which Data-Juicer uses too: show warnings and one line per operator.

    Progress bars are shown in a terminal only.
    """
    logger.remove()
    levels = {"": "INFO", "data_juicer": "WARNING"}
    logger.add(sys.stderr, format=_line_format, filter=levels)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _line_format(record: dict) -> str:
    """Return the format of a log line; the workflow's own warnings get the mark that shows them in the console too."""
    own_warning = record["level"].name == "WARNING" and not record["name"].startswith("data_juicer")
    return f"{WARNING if own_warning else '{time:HH:mm:ss} {level} '}{{message}}\n{{exception}}"


def _count_events(trace: Path) -> Counter:
    """Return the number of rows by (step, event), counted in the finished file."""
    with open(trace, encoding="utf-8") as lines:
        return Counter((row["step"], row["event"]) for row in map(json.loads, lines))


def _summary(data: Path, rows_in: int, kept: int, steps: list[dict], events: Counter) -> dict:
    """Return the summary; raise RuntimeError unless every input row is kept or dropped by one operator in the trace."""
    broken = Counter()
    expected = rows_in
    for step in steps:
        in_trace = events[step["step"], "dropped"]
        if step["rows_in"] != expected or step["rows_out"] != expected - in_trace:
            raise RuntimeError(f"the rows of step {step} do not add up with {in_trace} dropped rows in the trace")
        expected = step["rows_out"]
        broken.update(step.get("broken_images", {}))
    if kept != expected:
        raise RuntimeError(f"{kept} rows were written, the operators kept {expected}")
    return {
        "rows_in": rows_in,
        "rows_kept": kept,
        "rows_dropped": rows_in - kept,
        "errors": 0,
        "broken_images": {reason: broken[reason] for reason in BadImage.REASONS},
        "operators": steps,
        "data_juicer": changed_data_juicer.__version__,
        "input": {"path": str(data), "sha256": compute_sha256(data)},
    }
