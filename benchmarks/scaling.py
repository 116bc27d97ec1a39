"""Measure samples per second by the number of GPUs of one machine, at the shape of MGM-2B.

    python benchmarks/scaling.py --gpus 1 2 4 8
    python benchmarks/scaling.py --gpus 1 2 --shape tiny    # processes without a GPU, to try the script

LoRA is trained under ZeRO-2 with the random model and samples of benchmarks/train_step.py, with activation
checkpointing of every 18th layer. One run has the global batch of one GPU, divided among all (accumulation shrinks),
another the same number of samples for each GPU (the batch grows). There is no dropout, which would differ between
processes, so that losses at the same global batch can be compared.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from train_step import CONFIGURATIONS, Configuration, make_inputs, measure

LORA = replace(CONFIGURATIONS["lora_zero2"], dropout=0.0, activation_checkpointing=18)
TINY = {"micro_batch_size": 2, "gradient_accumulation_steps": 8, "steps": 5}


def configurations(alone: Configuration, counts: list[int]) -> dict[str, Configuration]:
    """Return configurations by name; that of one GPU counts for both kinds."""
    found = {"1": alone}
    for gpus in sorted(set(counts) - {1}):
        accumulation, rest = divmod(alone.gradient_accumulation_steps, gpus)
        if rest:
            raise SystemExit(f"--gpus {gpus}: cannot share {alone.gradient_accumulation_steps} micro batches evenly")
        found[f"{gpus}, same batch"] = replace(alone, gpus=gpus, gradient_accumulation_steps=accumulation)
        found[f"{gpus}, growing batch"] = replace(alone, gpus=gpus)
    return found


def print_table(rows: list[dict], gpus: dict[str, int]) -> None:
    alone = rows[0]
    print("\n| GPUs, global batch | samples/s | efficiency | reserved GiB | losses differ by at most |")
    print("|---|---|---|---|---|")
    for row in rows:
        name = row["configuration"]
        if "failed" in row:
            print(f"| {name} | failed with {row['failed']} |", *row["log"], sep="\n    ")
            continue
        efficiency = row["samples_per_second"] / alone["samples_per_second"] / gpus[name]
        pairs = zip(alone["losses"], row["losses"], strict=True)
        differ = "" if "growing" in name else f"{max(abs(a - b) / a for a, b in pairs):.1e}"
        print(f"| {name} | {row['samples_per_second']} | {efficiency:.1%} | {row['peak_reserved_gib']} | {differ} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="numbers to compare with one")
    parser.add_argument("--shape", choices=["mgm-2b", "tiny"], default="mgm-2b")
    parser.add_argument("--output", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    known = configurations(LORA if arguments.shape == "mgm-2b" else replace(LORA, **TINY), arguments.gpus)
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(arguments.shape, Path(folder), list(known.values()))
        rows = []
        for name, configuration in known.items():
            rows.append(measure(name, configuration, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
        print_table(rows, {name: configuration.gpus for name, configuration in known.items()})
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
