"""A stage that runs a recipe: from a dataset to kept rows, their stats, a trace, and a summary that adds up."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import datasets
from loguru import logger

from dj2mgm.config.recipe_parsing import check_models_named
from dj2mgm.data.images import BadImage
from dj2mgm.files import compute_sha256, write_json, write_jsonl
from dj2mgm.juicer import changed_data_juicer
from dj2mgm.juicer.empty_result import empty_result
from dj2mgm.juicer.engine import Engine
from dj2mgm.juicer.partitions import join_traces, output_rows, output_stats
from dj2mgm.juicer.recipe import check_installed
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.restart import fingerprint, working_folder
from dj2mgm.messages import WARNING

FILTERED, SYNTHESIZED = "filtered.jsonl", "synthesized.jsonl"
STATS, TRACE, SUMMARY = "stats.jsonl", "dropped.jsonl", "summary.json"


def run_recipe(settings: RecipeSettings, data: Path, output_dir: Path, rows_file: str) -> dict:
    """Run the recipe on `data` and write the four outputs into `output_dir`; return the summary.

    A folder inside `output_dir` keeps finished partitions while the stage runs. After a kill, the next run continues
    there if data, recipe, models and code are still the same. It does not read images again.

    Args:
        settings: settings of the stage.
        data: jsonl of the input rows.
        output_dir: folder of the outputs.
        rows_file: name of the output with the kept rows.

    Raises:
        InputError: If a row or the recipe is invalid, an operator fails, or no row is kept. Then there is no output.
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
