"""Turns filtered data and instructions into what the trainer reads, with absolute and verified image paths.

    python workflow_scripts/write_jsonl.py --config results/baseline/jsonl/config.yaml \\
        --filtered results/baseline/filter/filtered.jsonl --instructions results/datasets/shapes/finetune.json \\
        --output-dir results/baseline/jsonl

Writes pretrain.jsonl, finetune.jsonl and summary.json (counts that add up).
"""

import os

from command_line import command_line, path_arguments
from errors import InputError
from files import read_yaml, sha256_of, write_json
from formats.dj_jsonl import read_dj_jsonl
from formats.llava import read_llava
from formats.training_jsonl import caption_rows, write_training_jsonl


@command_line
def main() -> None:
    args = path_arguments(__doc__, "--config", "--filtered", "--instructions", "--output-dir")
    settings = read_yaml(args.config)
    threads = settings["cpu_threads"] or len(os.sched_getaffinity(0))
    sources = {
        "pretrain": (list(caption_rows(read_dj_jsonl(args.filtered))), settings["pretrain_images"]),
        "finetune": (list(read_llava(args.instructions)), settings["finetune_images"]),
    }
    summary: dict = {}
    for name, (rows, root) in sources.items():
        output = args.output_dir / f"{name}.jsonl"
        summary[name] = write_training_jsonl(
            rows, root, output, settings["on_bad_row"], settings["max_samples"], settings["seed"], threads
        )
        if summary[name]["rows_out"] == 0:
            raise InputError(f"no row of {name} is left to train on: {summary[name]}")
        print(f"{name}: {summary[name]['rows_out']} of {summary[name]['rows_in']} rows written to {output}", flush=True)
    summary["inputs"] = {"filtered": sha256_of(args.filtered), "instructions": sha256_of(args.instructions)}
    write_json(args.output_dir / "summary.json", summary)


if __name__ == "__main__":
    main()
