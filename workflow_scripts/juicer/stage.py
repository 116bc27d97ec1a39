"""A recipe's stage: a dataset in; kept rows, their stats, a trace and a summary that adds up out."""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from loguru import logger

from files import sha256_of, write_json, write_jsonl
from formats.images import BadImage
from juicer import library
from juicer.dataset import output_rows, read_dataset, stats_rows
from juicer.nothing_left import nothing_left
from juicer.recipe import build_operators, check_process, complete
from juicer.settings import StageSettings
from juicer.steps import Step, run_step

FILTERED, SYNTHESIZED = "filtered.jsonl", "synthesized.jsonl"
STATS, TRACE, SUMMARY = "stats.jsonl", "dropped.jsonl", "summary.json"
WORKING = ".data_juicer-"


def run_recipe(settings: StageSettings, data: Path, output_dir: Path, rows_file: str) -> dict:
    """Run the recipe on `data` and write the four outputs into `output_dir`; return the summary.

    Everything else that Data-Juicer writes goes to a folder inside `output_dir` that is removed at the end. It is new
    in every run, so that nothing cached by an earlier run is ever read.

    Args:
        rows_file: name of the output that holds the kept rows.

    Raises:
        InputError: a bad row, a bad recipe, an operator that fails, or no row left. No output is then left behind.
    """
    process = complete(settings.process, settings.arguments)
    check_process(process)
    for name in (rows_file, STATS, TRACE, SUMMARY):
        (output_dir / name).unlink(missing_ok=True)
    with working_folder(output_dir) as working:
        dataset = read_dataset(data, settings.image_root, working)
        operators = build_operators(process, settings.processes, working)
        rows_in = len(dataset)
        steps = []
        with open(working / TRACE, "w", encoding="utf-8") as trace:
            for number, operator in enumerate(operators, start=1):
                dataset, step = run_step(number, operator, dataset)
                dataset.cleanup_cache_files()
                trace.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in step.trace)
                steps.append(_summarize(step))
                logger.info(
                    f"[{number}/{len(operators)}] {step.operator}: {step.rows_in} rows in, {step.rows_out} out, "
                    f"{step.dropped} dropped, {step.changed} changed, {step.seconds:.1f} s"
                )
                if step.rows_out == 0:
                    trace.flush()
                    raise nothing_left(rows_in, steps, operators, working / TRACE)
        kept = write_jsonl(output_dir / rows_file, output_rows(dataset, settings.image_root))
        write_jsonl(output_dir / STATS, stats_rows(dataset))
        os.replace(working / TRACE, output_dir / TRACE)
        summary = _summary(data, rows_in, kept, steps, _count_events(output_dir / TRACE))
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
def working_folder(output_dir: Path) -> Iterator[Path]:
    """A new folder inside `output_dir`; those that killed runs have left are removed first."""
    output_dir = output_dir.resolve()
    output_dir.mkdir(parents=True, exist_ok=True)
    for left_over in output_dir.glob(f"{WORKING}*"):
        shutil.rmtree(left_over)
    working = Path(tempfile.mkdtemp(prefix=WORKING, dir=output_dir))
    try:
        yield working
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _summarize(step: Step) -> dict:
    summary = {
        "step": step.number,
        "operator": step.operator,
        "rows_in": step.rows_in,
        "rows_out": step.rows_out,
        "dropped": step.dropped,
        "changed": step.changed,
        "seconds": round(step.seconds, 3),
    }
    if step.broken_images:
        summary["broken_images"] = dict(step.broken_images)
    if step.recaption:
        summary["recaption"] = step.recaption
    return summary


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
