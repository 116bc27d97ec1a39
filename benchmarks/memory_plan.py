"""Compare predicted and measured memory of training at the shape of MGM-2B, on one GPU.

    python benchmarks/memory_plan.py                         # every configuration, one after the other
    python benchmarks/memory_plan.py lora_zero3 full_zero2   # some of them
    python benchmarks/memory_plan.py --shape tiny            # without a GPU, to try the script

Inputs are the same as in benchmarks/train_step.py. The workflow's own training stage trains each configuration for two
steps, and plans before it loads anything. The GPU's peak is the peak of PyTorch's allocations. The host's peak is the
resident memory of the process without pages of files, which the kernel can drop. The plan must be within 10 % of the
GPU's peak and 15 % of the host's, and must not accept a configuration that runs out of memory.
"""

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

from train_step import PROJECT, TrainingCase, launch, run_benchmark, train

from dj2mgm.planning.prediction import OUTSIDE_ALLOCATIONS
from dj2mgm.storage.files import write_json

ONE_STEP = TrainingCase(micro_batch_size=1, gradient_accumulation_steps=2, compile=False, steps=2, gpu_gib=24)
RECOMPUTED = replace(ONE_STEP, activation_checkpointing=True)
PLAIN = replace(RECOMPUTED, plain=True)
STAGE_1 = replace(ONE_STEP, stage="pretrain", tuning="stage1")
FULL = replace(RECOMPUTED, tuning="full")
CONFIGURATIONS = {
    "lora_plain_zero2": PLAIN,
    "lora_plain_zero3": replace(PLAIN, deepspeed="zero3_offload"),
    "lora_zero0": replace(RECOMPUTED, deepspeed="zero0", micro_batch_size=4),
    "lora_zero2": replace(ONE_STEP, micro_batch_size=8),
    "lora_zero2_recomputed": replace(RECOMPUTED, micro_batch_size=16),
    "lora_zero2_compiled": replace(RECOMPUTED, micro_batch_size=8, compile=True),
    "lora_zero3": replace(ONE_STEP, deepspeed="zero3", micro_batch_size=2),
    "lora_zero3_offload": replace(RECOMPUTED, deepspeed="zero3_offload_resident", micro_batch_size=8),
    "stage_1_plain": replace(STAGE_1, plain=True, micro_batch_size=4, activation_checkpointing=True),
    "stage_1": replace(STAGE_1, micro_batch_size=8),
    "stage_1_offload": replace(STAGE_1, deepspeed="zero2_offload", micro_batch_size=16, activation_checkpointing=True),
    "full_8bit": replace(FULL, deepspeed="adamw_8bit", micro_batch_size=8),
    "full_zero2": replace(FULL, deepspeed="zero2", gpu_gib=80),
    "full_zero2_offload": replace(FULL, deepspeed="zero2_offload"),
    "full_zero3_offload": replace(FULL, deepspeed="zero3_offload", micro_batch_size=4),
    "lora_too_large": replace(ONE_STEP, micro_batch_size=16),
}
BARS = {"gpu": 0.10, "host": 0.15}


def list_configurations(shape: str) -> dict[str, TrainingCase]:
    if shape != "tiny":
        return CONFIGURATIONS
    return {name: replace(configuration, micro_batch_size=2) for name, configuration in CONFIGURATIONS.items()}


def plan_and_train(configuration: TrainingCase, folder: Path, output: Path) -> None:
    """Run one training stage in this process, with a plan of the configuration's own model."""
    import dj2mgm.training.stage
    from plain_mgm import PlainArchitecture

    os.chdir(PROJECT)  # the folder of config/
    original_build = dj2mgm.training.stage.build_workload

    def build_workload(tuning, settings, architecture, dataset, projector):
        workload = original_build(tuning, settings, architecture, dataset, projector)
        if configuration.plain:  # the plain model computes logits for every token
            plain = PlainArchitecture(architecture.name, architecture.config)
            workload = replace(workload, architecture=plain, answer_tokens=workload.sequence_length)
        return workload

    def record_plan(settings, workload, machine):
        plan = require_memory(settings, workload, machine)
        output.mkdir(parents=True, exist_ok=True)
        (output / "plan.json").write_text(json.dumps(plan), encoding="utf-8")  # still there if memory runs out later
        return plan

    threading.Thread(target=watch_host, args=(output / "host.json",), daemon=True).start()
    require_memory = dj2mgm.training.stage.require_memory
    dj2mgm.training.stage.build_workload, dj2mgm.training.stage.require_memory = build_workload, record_plan
    train(configuration, folder, output)


def watch_host(record: Path) -> None:
    """Record the peak resident GiB of this process without pages of files."""
    peak = 0.0
    while True:
        sizes = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak = max(peak, sum(map(int, sizes)) / 2**20)
        write_json(record, peak)  # replaced at once, because the process may end at any moment
        time.sleep(0.05)


def measure(name: str, configuration: TrainingCase, folder: Path) -> dict:
    """Return prediction and measurement of one configuration, in GiB."""
    output = folder / "output" / name
    status = launch(__file__, name, configuration, folder)
    plan = json.loads((output / "plan.json").read_text(encoding="utf-8")) if (output / "plan.json").exists() else None
    row = {"configuration": name, "plan": plan, "cap_gib": configuration.gpu_gib}
    if status:
        text = (folder / f"{name}.log").read_text(encoding="utf-8")
        return row | {"out_of_memory": "out of memory" in text, "log": text.splitlines()[-25:]}
    metrics = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    return row | {
        "allocated_gib": metrics["peak_gpu_gib"],
        "reserved_gib": metrics["peak_gpu_reserved_gib"],
        "host_gib": json.loads((output / "host.json").read_text(encoding="utf-8")),
        "resident_gib": metrics["peak_host_rss_gib"],
        "driver_gib": read_driver_peak(output / "memory.csv"),
    }


def read_driver_peak(memory: Path) -> float | None:
    """Return the driver's greatest count, including the context; None without a GPU."""
    header, *rows = (line.split(",") for line in memory.read_text(encoding="utf-8").splitlines())
    columns = [index for index, column in enumerate(header) if column.startswith("gpu")]
    return max((float(row[columns[0]] or 0) for row in rows), default=None) if columns else None


def compare(row: dict) -> list[str]:
    """Return the row of the table, with a mark if a bar is missed."""
    plan = row["plan"]
    if plan is None:
        return [row["configuration"], "failed before the plan", *row["log"]]
    allocated = sum(size for part, size in plan["gpu"].items() if part not in OUTSIDE_ALLOCATIONS)
    fits = plan["gpu_gib"] is None or plan["gpu_gib"] <= row["cap_gib"]
    cells = [f"{row['configuration']:<22}"]
    if "host_gib" not in row:
        verdict = "ran out, as planned" if row["out_of_memory"] and not fits else "FAILED, though it was planned to fit"
        return [*cells, f"{allocated:>9.2f} predicted", verdict, *([] if row["out_of_memory"] else row["log"])]
    for name, predicted, measured in (
        ("gpu", allocated, row["allocated_gib"]),
        ("host", plan["host_gib"], row["host_gib"]),
    ):
        error = (predicted - measured) / measured if measured else 0.0
        cells.append(f"{predicted:>9.2f}{measured:>9.2f}{error:>+8.1%}{' !' if abs(error) > BARS[name] else '  '}")
    driver = "" if row["driver_gib"] is None else f"{row['driver_gib']:>9.2f}"
    return [*cells, f"{row['reserved_gib']:>9.2f}", driver, "" if fits else "  planned not to fit"]


def print_table(rows: list[dict]) -> None:
    columns = f"{'predicted':>9}{'measured':>9}{'error':>8}  "
    print(f"\n{'GiB':<22} {'GPU: ' + columns}{'host: ' + columns}{'reserved':>9}{'driver':>9}")
    for row in rows:
        print(*compare(row))


if __name__ == "__main__":
    run_benchmark(__doc__, list_configurations, plan_and_train, measure, print_table)
