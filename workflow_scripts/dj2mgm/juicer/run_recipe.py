"""Run of a stage's recipe on a dataset, with the kept rows, their stats, a trace, and a summary that adds up."""

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
from loguru import logger

from dj2mgm.cli.messages import WARNING, note
from dj2mgm.data.formats import extract_caption
from dj2mgm.data.images import BadImageError
from dj2mgm.data.texts import find_script
from dj2mgm.juicer import engine, patched_data_juicer
from dj2mgm.juicer.engine import Engine, check_installed
from dj2mgm.juicer.filter_limits import NoRowsKeptError, make_no_rows_error
from dj2mgm.juicer.operators.declarations import find_model_files
from dj2mgm.juicer.partitions import iterate_column_values, iterate_output_rows, iterate_output_stats, join_traces
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.recipes.catalogue import DATASET_FILES, INSTRUCTIONS, find_recipe_files
from dj2mgm.recipes.recipe_parsing import RecipeStep, check_models_named
from dj2mgm.records import OperatorSummary, RecipeSummary
from dj2mgm.script_modules import find_modules
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_json, write_jsonl
from dj2mgm.storage.streaming import DiskMap

FILTERED, SYNTHESIZED = "filtered.jsonl", "synthesized.jsonl"
MANY_ROWS, MUCH_OF_A_SCRIPT = 1 / 3, 1 / 2  # shares of rows whose loss in one step is noted
FEW_ROWS = 3  # fewer rows of a script are not counted
STATS, TRACE, SUMMARY = "stats.jsonl", "dropped.jsonl", "summary.json"
WORKING_FOLDER_PREFIX = ".data_juicer-"


def configure_log() -> None:
    """Configure loguru, which Data-Juicer uses too: show warnings and one line per operator.

    Progress bars are shown in a terminal only.
    """
    logger.remove()
    levels = {"": "INFO", "data_juicer": "WARNING"}
    logger.add(sys.stderr, format=_choose_line_format, filter=levels)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _choose_line_format(record: dict) -> str:
    """Return the format of a log line; the workflow's own warnings get the mark that shows them in the console too."""
    own_warning = record["level"].name == "WARNING" and not record["name"].startswith("data_juicer")
    return f"{WARNING if own_warning else '{time:HH:mm:ss} {level} '}{{message}}\n{{exception}}"


def run_recipe(settings: RecipeSettings, data: Path, output_dir: Path, rows_file: str) -> RecipeSummary:
    """Run the recipe on `data` and write the four outputs into `output_dir`; return the summary.

    A folder inside `output_dir` keeps finished partitions while the stage runs. After a kill, the next run continues
    there if data, recipe, models and code are still the same, and skips images that were already read. After an
    InputError (an invalid row or recipe, a failing operator, no row kept) there is no output.

    `rows_file` is the name of the output with the kept rows.
    """
    steps = settings.complete(settings.steps)
    check_installed(steps)
    check_models_named(steps)
    for name in (rows_file, STATS, TRACE, SUMMARY):
        (output_dir / name).unlink(missing_ok=True)
    with open_working_folder(output_dir, compute_recipe_fingerprint(steps, settings, data)) as working:
        recipe_engine = Engine(steps, settings, working)
        recipe_engine.run(data)
        join_traces(recipe_engine.folders, len(steps), working / TRACE)
        if not recipe_engine.rows_out:
            raise make_no_rows_error(recipe_engine, working / TRACE)
        rows_kept = write_jsonl(
            output_dir / rows_file, iterate_output_rows(recipe_engine.folders[-1], settings.image_root)
        )
        write_jsonl(output_dir / STATS, iterate_output_stats(recipe_engine.folders[-1]))
        os.replace(working / TRACE, output_dir / TRACE)
        _check_counts(recipe_engine.rows_in, rows_kept, recipe_engine.summaries, _count_events(output_dir / TRACE))
        summary = RecipeSummary(
            rows_in=recipe_engine.rows_in,
            rows_kept=rows_kept,
            broken_images=_count_broken_images(recipe_engine.summaries),
            operators=recipe_engine.summaries,
            data_juicer=patched_data_juicer.__version__,
            input={"path": str(data), "sha256": compute_sha256(data)},
            rows=settings.rows if settings.rows == INSTRUCTIONS else None,
        )
        for sentence in describe_losses(steps, recipe_engine.summaries, recipe_engine.folders[0], output_dir / TRACE):
            note(sentence)
    write_json(output_dir / SUMMARY, summary.as_dict())
    return summary


def describe_losses(
    recipe: Sequence[RecipeStep], operators: Sequence[OperatorSummary], rows: Path, trace: Path
) -> Iterator[str]:
    """Yield a sentence for each operator that has dropped many rows, or most rows whose text is in one script.

    Rows that the recipe requests to drop by their share or number, such as `keep_fraction`, do not count.

    Args:
        recipe: steps of the recipe, in the order of `operators`.
        operators: summaries of the operators.
        rows: folder of the partitions of the input.
        trace: file of the dropped rows.
    """
    steps = DiskMap()  # step that dropped each row
    steps.fill((row["id"], row["step"]) for row in read_jsonl(trace) if row["event"] == "dropped")
    dropped: Counter[tuple[int | None, str]] = Counter()  # by step (None: kept) and script
    for identifier, text in iterate_column_values(rows, "id", "text"):
        dropped[steps.get(identifier), find_script(extract_caption(text)) or "no letters"] += 1
    remaining: Counter[str] = Counter()
    for (_, script), count in dropped.items():
        remaining[script] += count
    for step, operator in zip(recipe, operators, strict=True):
        kept = _find_requested_share(step.arguments, operator.rows_in)
        many, much = (1 - kept * (1 - share) for share in (MANY_ROWS, MUCH_OF_A_SCRIPT))
        lost = {script: dropped[operator.step, script] for script in remaining if dropped[operator.step, script]}
        most = [
            f"{count:,} of {remaining[script]:,} in {script}"
            for script, count in lost.items()
            if script != "no letters" and remaining[script] >= FEW_ROWS and count > much * remaining[script]
        ]
        if most or operator.dropped > many * operator.rows_in:
            scripts = f" ({', '.join(most)})" if most and len(remaining) > 1 else ""
            yield (
                f"{operator.operator} drops {operator.dropped:,} of {operator.rows_in:,} rows{scripts}. {TRACE} lists "
                "them; if they are good, change its limits in the recipe"
            )
        remaining -= Counter(lost)


def _find_requested_share(arguments: dict, rows: int) -> float:
    """Return the share of the rows that an operator is to keep; 1 if its arguments request none."""

    def find(*names: str) -> float | None:
        return next((arguments[name] for name in names if arguments.get(name) is not None), None)

    number = find("keep_rows", "select_num", "topk")
    share = find("keep_fraction", "select_ratio", "top_ratio")
    low, high = find("lower_quantile", "lower_percentile"), find("upper_quantile", "upper_percentile")
    requested = (1.0 if share is None else share, 1.0 if number is None else number / max(1, rows))
    return min(*requested, (1.0 if high is None else high) - (low or 0.0))


def compute_recipe_fingerprint(steps: Sequence[RecipeStep], settings: RecipeSettings, data: Path) -> str:
    """Return a digest of everything that a stage's unfinished work depends on.

    These are data, files of the dataset, recipe, models, and the code of the engine and the modules that it imports,
    including operators. The executor is excluded, because it does not change results.
    """
    process = [step.as_dict() for step in steps]
    dataset_files = [step.arguments[name] for step in steps for name in DATASET_FILES if step.arguments.get(name)]
    files = sorted({*find_model_files(process), *map(Path, find_recipe_files(process)), *map(Path, dataset_files)})
    code = compute_sha256(*find_modules(Path(engine.__file__)))
    digests = [compute_sha256(file) for file in files]
    parts = [process, str(settings.image_root), compute_sha256(data), digests, code, patched_data_juicer.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def open_working_folder(output_dir: Path, fingerprint: str) -> Iterator[Path]:
    """Make a folder inside `output_dir`, and remove it at the end.

    A run that fails or is killed leaves it, and the next run with the same fingerprint continues there. Folders of
    other fingerprints are removed first.
    """
    output_dir = output_dir.resolve()
    working = output_dir / f"{WORKING_FOLDER_PREFIX}{fingerprint[:16]}"
    for folder in output_dir.glob(f"{WORKING_FOLDER_PREFIX}*"):
        if folder != working:
            shutil.rmtree(folder)
    working.mkdir(parents=True, exist_ok=True)
    finished = False
    try:
        yield working
        finished = True
    except NoRowsKeptError:
        finished = True  # the user may correct the images now, so the next run must read them again
        raise
    finally:
        if finished:
            shutil.rmtree(working, ignore_errors=True)


def _count_events(trace: Path) -> Counter:
    """Return the number of rows by (step, event), counted in the finished file."""
    with open(trace, encoding="utf-8") as lines:
        return Counter((row["step"], row["event"]) for row in map(json.loads, lines))


def _check_counts(rows_in: int, rows_kept: int, operators: list[OperatorSummary], events: Counter) -> None:
    """Raise RuntimeError unless every input row is kept or dropped by one operator in the trace."""
    expected = rows_in
    for operator in operators:
        in_trace = events[operator.step, "dropped"]
        if operator.rows_in != expected or operator.rows_out != expected - in_trace:
            raise RuntimeError(f"the rows of step {operator} do not add up with {in_trace} dropped rows in the trace")
        expected = operator.rows_out
    if rows_kept != expected:
        raise RuntimeError(f"{rows_kept} rows were written, the operators kept {expected}")


def _count_broken_images(operators: list[OperatorSummary]) -> dict[str, int]:
    broken = Counter()
    for operator in operators:
        broken.update(operator.reports.get("broken_images", {}))
    return {reason: broken[reason] for reason in BadImageError.REASONS}
