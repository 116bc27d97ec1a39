"""Run of a stage's recipe on a dataset, with the kept rows, their stats, a trace, and a summary that adds up."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dj2mgm.data.images import BadImage
from dj2mgm.juicer import changed_data_juicer, engine
from dj2mgm.juicer.built_operators import check_installed
from dj2mgm.juicer.empty_result import EmptyResult, make_empty_result
from dj2mgm.juicer.engine import Engine
from dj2mgm.juicer.operators.declarations import find_model_files
from dj2mgm.juicer.partitions import iterate_output_rows, iterate_output_stats, join_traces
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.recipes.operator_checks import check_models_named
from dj2mgm.recipes.recipe_files import find_recipe_files
from dj2mgm.recipes.recipe_step import DATASET_FILES, INSTRUCTIONS, RecipeStep
from dj2mgm.script_modules import find_modules
from dj2mgm.storage.files import compute_sha256, write_json, write_jsonl

FILTERED, SYNTHESIZED = "filtered.jsonl", "synthesized.jsonl"
STATS, TRACE, SUMMARY = "stats.jsonl", "dropped.jsonl", "summary.json"
WORKING_FOLDER_PREFIX = ".data_juicer-"


def run_recipe(settings: RecipeSettings, data: Path, output_dir: Path, rows_file: str) -> dict:
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
            steps_done, first = recipe_engine.summaries, recipe_engine.folders[0]
            raise make_empty_result(recipe_engine.rows_in, steps_done, recipe_engine.operators, working / TRACE, first)
        rows_kept = write_jsonl(
            output_dir / rows_file, iterate_output_rows(recipe_engine.folders[-1], settings.image_root)
        )
        write_jsonl(output_dir / STATS, iterate_output_stats(recipe_engine.folders[-1]))
        os.replace(working / TRACE, output_dir / TRACE)
        summary = _build_summary(
            data, recipe_engine.rows_in, rows_kept, recipe_engine.summaries, _count_events(output_dir / TRACE)
        )
        summary |= {"rows": settings.rows} if settings.rows == INSTRUCTIONS else {}
    write_json(output_dir / SUMMARY, summary)
    return summary


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
    parts = [process, str(settings.image_root), compute_sha256(data), digests, code, changed_data_juicer.__version__]
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
    except EmptyResult:
        finished = True  # the user may correct the images now, so the next run must read them again
        raise
    finally:
        if finished:
            shutil.rmtree(working, ignore_errors=True)


def _count_events(trace: Path) -> Counter:
    """Return the number of rows by (step, event), counted in the finished file."""
    with open(trace, encoding="utf-8") as lines:
        return Counter((row["step"], row["event"]) for row in map(json.loads, lines))


def _build_summary(data: Path, rows_in: int, rows_kept: int, steps: list[dict], events: Counter) -> dict:
    """Return the summary; raise RuntimeError unless every input row is kept or dropped by one operator in the trace."""
    broken = Counter()
    expected = rows_in
    for step in steps:
        in_trace = events[step["step"], "dropped"]
        if step["rows_in"] != expected or step["rows_out"] != expected - in_trace:
            raise RuntimeError(f"the rows of step {step} do not add up with {in_trace} dropped rows in the trace")
        expected = step["rows_out"]
        broken.update(step.get("broken_images", {}))
    if rows_kept != expected:
        raise RuntimeError(f"{rows_kept} rows were written, the operators kept {expected}")
    return {
        "rows_in": rows_in,
        "rows_kept": rows_kept,
        "rows_dropped": rows_in - rows_kept,
        "errors": 0,
        "broken_images": {reason: broken[reason] for reason in BadImage.REASONS},
        "operators": steps,
        "data_juicer": changed_data_juicer.__version__,
        "input": {"path": str(data), "sha256": compute_sha256(data)},
    }
