"""Turns pairs and instructions into what the trainer reads, with absolute and verified image paths.

    python workflow_scripts/write_jsonl.py --config results/baseline/jsonl/config.yaml \\
        --pairs results/baseline/filter/filtered.jsonl --instructions results/datasets/shapes/finetune.json \\
        --output-dir results/baseline/jsonl

`--same-samples-as results/baseline/jsonl/summary.json` writes as many pairs as another experiment trains on, by leaving
out or repeating rows, so that only the data differs and not how much is trained.

Writes pretrain.jsonl, finetune.jsonl and summary.json (counts that add up).
"""

import argparse
import os
from pathlib import Path

from command_line import command_line
from errors import InputError
from files import read_json, read_yaml, sha256_of, write_json
from formats.dj_jsonl import read_dj_jsonl
from formats.llava import read_llava
from formats.training_jsonl import SampleRules, caption_rows, write_training_jsonl


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--config", "--pairs", "--instructions", "--output-dir"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--same-samples-as", type=Path)
    args = parser.parse_args()
    settings = read_yaml(args.config)
    processes = settings["cpu_threads"] or len(os.sched_getaffinity(0))
    budget = read_json(args.same_samples_as)["pretrain"]["rows_out"] if args.same_samples_as else None
    sources = {
        "pretrain": (
            caption_rows(read_dj_jsonl(args.pairs), settings["question"]),
            settings["pretrain_images"],
            budget,
        ),
        "finetune": (read_llava(args.instructions), settings["finetune_images"], None),
    }
    summary: dict = {}
    for name, (rows, root, budget) in sources.items():
        output = args.output_dir / f"{name}.jsonl"
        rules = SampleRules(settings["on_bad_row"], settings["max_samples"], budget, settings["seed"])
        counts = summary[name] = write_training_jsonl(rows, root, output, rules, processes)
        if counts["rows_out"] == 0:
            raise InputError(f"no row of {name} is left to train on: {counts}")
        more = f", {counts['repeated']} of them repeats" if counts["repeated"] else ""
        print(f"{name}: {counts['rows_out']} samples{more} from {counts['rows_in']} rows, in {output}", flush=True)
    summary["inputs"] = {"pairs": sha256_of(args.pairs), "instructions": sha256_of(args.instructions)}
    write_json(args.output_dir / "summary.json", summary)


if __name__ == "__main__":
    main()
