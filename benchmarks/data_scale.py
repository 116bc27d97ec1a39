"""Measure time and memory of the data stages by the number of rows: make_dataset, filter (processes, Ray) and jsonl.

    python benchmarks/data_scale.py --rows 10000 100000 1000000 --executors default ray
    python benchmarks/data_scale.py --executors              # without the filter

It draws 1 000 image-text pairs of the embedded dataset, including faults, and repeats their images, with a number in
each caption. The same number of instructions forms one JSON list. Each stage runs the command of its rule, with the
baseline recipe. The stage jsonl gets all pairs, and drops those whose image cannot be read. Memory is the peak
proportional set size of all processes of the stage (read five times per second), in which a shared page counts once. A
row of Markdown is printed for each run.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep

import psutil

PROJECT = Path(__file__).resolve().parents[1]
SCRIPTS = PROJECT / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

from dj2mgm.data.formats import build_conversation, build_dj_text, extract_caption  # noqa: E402
from dj2mgm.data.shapes import write_shapes  # noqa: E402
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset  # noqa: E402
from dj2mgm.runs.all_runs import Runs  # noqa: E402
from dj2mgm.storage.files import read_jsonl, write_json_list, write_jsonl, write_yaml  # noqa: E402

DRAWN = 1000
INTERVAL_S = 0.2


def repeat_pairs(folder: Path, rows: int) -> Iterator[dict]:
    """Yield `rows` pairs with ids and captions of their own, and images of the drawn pairs."""
    drawn_rows = list(read_jsonl(folder / "drawn/pretrain.jsonl"))
    for number in range(rows):
        row = drawn_rows[number % len(drawn_rows)]
        yield row | {"id": f"n{number}", "text": build_dj_text(f"{extract_caption(row['text'])} {number}")}


@dataclass
class Usage:
    """Time and memory of a stage: seconds, CPU seconds of all its processes, and peak MiB."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_mib: float = 0.0


def read_usage(process: psutil.Process) -> tuple[float, dict[int, float]]:
    """Return MiB (proportional set size) of a process and its descendants, and CPU seconds by process id."""
    kib, seconds = 0, {}
    for member in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{member.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            times = member.cpu_times()
        except (OSError, psutil.NoSuchProcess):
            continue  # the process has ended
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        seconds[member.pid] = times.user + times.system
    return kib / 1024, seconds


def measure(script: str, **flags: object) -> Usage:
    arguments = [str(word) for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", value)]
    start = perf_counter()
    usage, cpu_seconds = Usage(), {}
    command = [sys.executable, SCRIPTS / script, *arguments]
    with TemporaryFile("w+") as log, psutil.Popen(command, stdout=log, stderr=log) as stage:
        while stage.poll() is None:
            with suppress(psutil.NoSuchProcess):
                memory, seconds = read_usage(stage)
                usage.memory_mib = max(usage.memory_mib, memory)
                cpu_seconds |= seconds
            sleep(INTERVAL_S)
        if stage.returncode:
            log.seek(0)
            raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{log.read()[-2000:]}")
    usage.wall_s, usage.cpu_s = perf_counter() - start, sum(cpu_seconds.values())
    return usage


def write_sources(folder: Path, rows: int) -> None:
    """Write pairs, and instructions in one JSON list, as a user provides them."""
    write_jsonl(folder / "pairs.jsonl", repeat_pairs(folder, rows))
    conversations = (
        build_conversation(row["id"], row["images"][0], "What is this?", extract_caption(row["text"]))
        for row in repeat_pairs(folder, rows)
    )
    write_json_list(folder / "instructions.json", conversations)


def run_make_dataset(folder: Path) -> Usage:
    files = {"pretrain": "pairs.jsonl", "finetune": "instructions.json"}
    images = str(folder / "drawn")
    write_yaml(folder / "own.yaml", {k: {"file": str(folder / file), "images": images} for k, file in files.items()})
    return measure("make_dataset.py", config=folder / "own.yaml", output_dir=folder / "dataset")


def run_filter(settings: dict, folder: Path, executor: str, processes: int) -> Usage:
    changes = {"image_root": str(folder / "drawn"), "processes": processes}
    recipe = settings["filter"].recipe | {"executor": executor}
    write_yaml(folder / "filter.yaml", settings["filter"].file_content() | changes | {"recipe": recipe})
    output = folder / f"filter-{executor}"
    return measure(
        "filter_data.py", config=folder / "filter.yaml", data=folder / "dataset/pretrain.jsonl", output_dir=output
    )


def run_jsonl(settings: dict, folder: Path, rows: int, processes: int) -> Usage:
    changes = dict.fromkeys(("pretrain_images", "finetune_images", "evaluation_images"), str(folder / "drawn"))
    changes |= {"max_samples": rows, "cpu_threads": processes, "on_bad_row": "drop"}
    write_yaml(folder / "jsonl.yaml", settings["jsonl"].file_content() | changes)
    return measure(
        "write_jsonl.py",
        config=folder / "jsonl.yaml",
        pairs=folder / "dataset/pretrain.jsonl",
        instructions=folder / "dataset/finetune.json",
        evaluation=folder / "dataset/evaluation.jsonl",
        output_dir=folder / "jsonl",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--executors", nargs="*", default=["default", "ray"], choices=["default", "ray"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder for files of a few GB (default: the temporary folder)")
    arguments = parser.parse_args()
    os.chdir(PROJECT)
    embedded = resolve_dataset("shapes").settings
    settings = Runs({}).first_seed("baseline").settings
    with TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        write_shapes(embedded.model_copy(update={"pretrain_pairs": DRAWN}), folder / "drawn")
        print("| stage | rows | s | CPU s | CPU µs a row | MiB |\n|---|---|---|---|---|---|", flush=True)
        for rows in arguments.rows:
            write_sources(folder, rows)
            stages = {"make_dataset": partial(run_make_dataset, folder)}
            for executor in arguments.executors:
                stages[f"filter, {executor}"] = partial(run_filter, settings, folder, executor, arguments.processes)
            stages["jsonl"] = partial(run_jsonl, settings, folder, rows, arguments.processes)
            for name, run in stages.items():
                usage = run()
                figures = (
                    f"{usage.wall_s:.1f} | {usage.cpu_s:.1f} | {usage.cpu_s / rows * 1e6:.0f} | {usage.memory_mib:.0f}"
                )
                print(f"| {name} | {rows} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
