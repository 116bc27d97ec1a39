"""Measure samples per second by the number of GPUs of one machine, with instructions of real lengths.

    python benchmarks/scaling.py --gpus 1 2 4 8                              # MGM-2B
    python benchmarks/scaling.py --gpus 1 2 --shape qwen3-vl-2b-instruct     # default settings, including `auto`
    python benchmarks/scaling.py --gpus 1 2 --shape tiny                     # to try it without a GPU (or tiny-vlm)
    python benchmarks/scaling.py --gpus 2 --folder FOLDER                    # keep all rows; only missing rows are run

LoRA is trained on each GPU's 22 GiB: MGM-2B under ZeRO-1 with the random model and samples of benchmarks/train_step.py,
and activation checkpointing of every 18th layer; other models as in benchmarks/vlm_step.py. The global batch of 128 is
the batch of one GPU, divided among all GPUs. Models are also trained with as many samples for each GPU, so that the
batch grows. There is no dropout, which would differ between processes, so that losses at the same global batch can be
compared. The last row is FP8 on the largest number of GPUs. Rates are computed from the median step after the first
three.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import train_step
import vlm_step
from loop import limit_gpu_memory
from random_vlm import SHAPES, TINY

from dj2mgm.storage.files import read_jsonl, write_jsonl

MGM, TINY_MGM, TINY_VLM = "mgm-2b", "tiny", "tiny-vlm"
STEPS = 20
ROWS = "rows.jsonl"  # file of measurements in the folder
LORA = replace(
    train_step.CONFIGURATIONS["lora_lengths"], deepspeed="zero1", dropout=0.0, activation_checkpointing=18, steps=STEPS
)
SMALL = {"micro_batch_size": 2, "gradient_accumulation_steps": 8, "steps": 5}
FP8 = ", FP8"
Measure = Callable[[], dict]


def list_mgm(shape: str, counts: list[int], folder: Path) -> dict[str, Measure]:
    """Return functions that measure MGM by name of the row; make its inputs if they are missing."""
    one_gpu = LORA if shape == MGM else replace(LORA, **SMALL)
    cases = {"1": one_gpu}
    for gpus in sorted(set(counts) - {1}):
        accumulation, remainder = divmod(one_gpu.gradient_accumulation_steps, gpus)
        if remainder:
            raise SystemExit(f"--gpus {gpus}: cannot share {one_gpu.gradient_accumulation_steps} micro batches evenly")
        cases[f"{gpus}"] = replace(one_gpu, gpus=gpus, gradient_accumulation_steps=accumulation)
        cases[f"{gpus}, growing batch"] = replace(one_gpu, gpus=gpus, steps=min(STEPS, 8))
    largest = max(counts)
    cases[f"{largest}{FP8}"] = replace(cases[f"{largest}"], precision="fp8")
    if not (folder / "lengths.json").exists():
        train_step.make_inputs(shape, folder, list(cases.values()))
    return {name: partial(train_step.measure, name, configuration, folder) for name, configuration in cases.items()}


def list_vlm(shape: str, counts: list[int], folder: Path) -> dict[str, Measure]:
    """Return functions that measure a model of transformers by name of the row; make its inputs if they are missing."""
    if not (folder / "data.jsonl").exists():
        vlm_step.make_inputs(*((TINY, folder, 4) if shape == TINY_VLM else (shape, folder, STEPS)))
    measures = {"1": partial(measure_vlm, "auto", folder, 1)}
    for gpus in sorted(set(counts) - {1}):
        measures[f"{gpus}"] = partial(measure_vlm, "auto", folder, gpus)
        measures[f"{gpus}, growing batch"] = partial(measure_vlm, "auto", folder, gpus, growth=gpus)
    return measures | {f"{max(counts)}{FP8}": partial(measure_vlm, "auto_fp8", folder, max(counts))}


def measure_vlm(row: str, folder: Path, gpus: int, growth: int = 1) -> dict:
    with limit_gpu_memory(22.0):
        return vlm_step.measure(row, folder, gpus, dropout=0.0, growth=growth)


def print_table(rows: dict[str, dict]) -> None:
    one_gpu = rows["1"]
    print(
        "\n| GPUs | samples/s | efficiency | slowest step from the second on / median | planned, reserved GiB | "
        "losses differ by at most |"
    )
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        if "failed" in row:
            print(f"| {name} | failed with {row['failed']} |", *row["log"], sep="\n    ")
            continue
        is_comparable = name.isdigit()
        gpus = int(name.split(",")[0])
        efficiency = row["samples_per_second"] / one_gpu["samples_per_second"] / gpus if FP8 not in name else None
        pairs = zip(one_gpu["losses"], row["losses"], strict=False)
        difference = f"{max(abs(a - b) / a for a, b in pairs):.1e}" if is_comparable else ""
        steps = row["step_seconds"]
        reserved = row.get("peak_gpu_reserved_gib") or row.get("peak_reserved_gib")
        print(
            f"| {name} | {row['samples_per_second']} | {f'{efficiency:.1%}' if efficiency else ''} | "
            f"{max(steps) / statistics.median(steps):.2f} | "
            f"{row.get('planned_gpu_gib', '')}, {reserved} | {difference} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="numbers to compare with one")
    parser.add_argument(
        "--shape", choices=[MGM, TINY_MGM, TINY_VLM, *(shape for shape in SHAPES if shape != TINY)], default=MGM
    )
    parser.add_argument("--folder", type=Path, help="keep all files in this folder, and use existing ones")
    parser.add_argument("--rows", nargs="+", help="measure these rows only, such as 1 or '2, FP8' (default: all)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        list_rows = list_mgm if arguments.shape in (MGM, TINY_MGM) else list_vlm
        measures = list_rows(arguments.shape, arguments.gpus, folder)
        rows = {row["name"]: row for row in read_jsonl(folder / ROWS)} if (folder / ROWS).exists() else {}
        for name in arguments.rows or measures:
            if name not in rows:
                rows[name] = {"name": name} | measures[name]()
                print(json.dumps(rows[name]), flush=True)
                write_jsonl(folder / ROWS, rows.values())
        if "1" in rows:
            print_table({name: rows[name] for name in measures if name in rows})


if __name__ == "__main__":
    main()
