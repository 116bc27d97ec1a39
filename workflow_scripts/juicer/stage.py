"""A recipe's stage: a dataset in; kept rows, their stats, a trace and a summary that adds up out."""

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from loguru import logger

from files import sha256_of, write_json, write_jsonl
from formats.images import BadImage
from juicer import library
from juicer.nothing_left import nothing_left
from juicer.outputs import output_rows, output_stats
from juicer.partitions import join_traces
from juicer.recipe import build_operators, check_process, complete
from juicer.settings import StageSettings
from juicer.work import Work, fingerprint

FILTERED, SYNTHESIZED = "filtered.jsonl", "synthesized.jsonl"
STATS, TRACE, SUMMARY = "stats.jsonl", "dropped.jsonl", "summary.json"
WORKING = ".data_juicer-"


def run_recipe(settings: StageSettings, data: Path, output_dir: Path, rows_file: str) -> dict:
    """Run the recipe on `data` and write the four outputs into `output_dir`; return the summary.

    A folder inside `output_dir` keeps what was done while the stage runs. A run that was killed goes on there, if data,
    recipe, models and code are still the same; images are not looked at again.

    Args:
        rows_file: name of the output that holds the kept rows.

    Raises:
        InputError: a bad row, a bad recipe, an operator that fails, or no row left. No output is then left behind.
    """
    process = complete(settings.process, settings.arguments)
    check_process(process)
    for name in (rows_file, STATS, TRACE, SUMMARY):
        (output_dir / name).unlink(missing_ok=True)
    with working_folder(output_dir, fingerprint(process, settings, data)) as working:
        # a process with Ray in it must not fork: Ray's gRPC threads crash at times
        operators = build_operators(process, 1 if settings.on_ray else settings.processes, working)
        work = Work(process, operators, settings, working)
        work.run(data)
        join_traces(work.folders, len(process), working / TRACE)
        if not work.rows_left:
            raise nothing_left(work.rows_in, work.steps, operators, working / TRACE)
        kept = write_jsonl(output_dir / rows_file, output_rows(work.folders[-1], settings.image_root))
        write_jsonl(output_dir / STATS, output_stats(work.folders[-1]))
        os.replace(working / TRACE, output_dir / TRACE)
        summary = _summary(data, work.rows_in, kept, work.steps, _count_events(output_dir / TRACE))
    write_json(output_dir / SUMMARY, summary)
    return summary


def configure_log() -> None:
    """One line for each operator on stderr; of Data-Juicer only warnings; progress bars in a terminal."""
    logger.remove()
    levels = {"": "INFO", "data_juicer": "WARNING"}
    logger.add(sys.stderr, format="{time:HH:mm:ss} {level} {message}", filter=levels)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


@contextmanager
def working_folder(output_dir: Path, fingerprint: str = "") -> Iterator[Path]:
    """A folder inside `output_dir`, removed at a successful end. With a fingerprint, what fails or is killed leaves it
    for another run to go on with; those of other fingerprints are removed first.
    """
    output_dir = output_dir.resolve()
    working = output_dir / f"{WORKING}{fingerprint[:16]}"
    for left_over in output_dir.glob(f"{WORKING}*"):
        if not fingerprint or left_over != working:
            shutil.rmtree(left_over)
    working.mkdir(parents=True, exist_ok=True)
    try:
        yield working
    except Exception:
        if not fingerprint:
            shutil.rmtree(working, ignore_errors=True)
        raise
    shutil.rmtree(working, ignore_errors=True)


def _count_events(trace: Path) -> Counter:
    """(step, event) → rows, counted in the finished file."""
    with open(trace, encoding="utf-8") as lines:
        return Counter((row["step"], row["event"]) for row in map(json.loads, lines))


def _summary(data: Path, rows_in: int, kept: int, steps: list[dict], events: Counter) -> dict:
    """Counts that add up, or a defect: every row in is kept or is in the trace, dropped by one operator."""
    broken = Counter()
    expected = rows_in
    for step in steps:
        in_trace = events[step["step"], "dropped"]
        if step["rows_in"] != expected or step["rows_out"] != expected - in_trace:
            raise RuntimeError(f"the rows of step {step} do not add up with {in_trace} dropped rows in the trace")
        expected = step["rows_out"]
        broken.update(step.get("broken_images", {}))
    if kept != expected:
        raise RuntimeError(f"{kept} rows were written, the operators left {expected}")
    return {
        "rows_in": rows_in,
        "rows_kept": kept,
        "rows_dropped": rows_in - kept,
        "errors": 0,
        "broken_images": {reason: broken[reason] for reason in BadImage.REASONS},
        "operators": steps,
        "data_juicer": library.__version__,
        "input": {"path": str(data), "sha256": sha256_of(data)},
    }
