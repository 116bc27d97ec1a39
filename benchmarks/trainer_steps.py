"""Record the steps of transformers' Trainer, with which LLaMA-Factory and ms-swift train too.

    PYTHON benchmarks/trainer_steps.py llamafactory FOLDER ROWS    # with FOLDER/arguments.json

This module imports nothing of the workflow, because `peers.py` runs it in the environments of other packages.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import torch
import transformers


class Steps(transformers.TrainerCallback):
    """Loss and time of each step in `metrics.jsonl`; peak memory of the GPU in `metrics.json`.

    Both files are written at each step, so that they are complete if the process is stopped.

    Args:
        folder: folder to write to.
        rows: rows of the data, if they may be packed into fewer sequences.
    """

    def __init__(self, folder: Path, rows: int | None = None):
        self.folder, self.rows, self.start, self.metrics = folder, rows, time.monotonic(), {}

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        sequences = len(train_dataloader.dataset)
        step_sequences = args.train_batch_size * args.gradient_accumulation_steps
        self.metrics["samples_per_step"] = step_sequences * (self.rows or sequences) / sequences

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"loss": float(logs["loss"]), "seconds": time.monotonic() - self.start}) + "\n")
        peaks = {"peak_gpu_gib": torch.cuda.max_memory_allocated()}
        peaks |= {"peak_gpu_reserved_gib": torch.cuda.max_memory_reserved(), "peak_host_rss_gib": None}
        self.metrics |= {name: value and round(value / 2**30, 2) for name, value in peaks.items()}
        (self.folder / "metrics.json").write_text(json.dumps(self.metrics), encoding="utf-8")


def train_with(package: str, folder: Path, rows: int) -> None:
    """Train with the package's own command, which reads its arguments from `arguments.json`."""
    arguments = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    steps = Steps(folder, rows)
    steps.metrics["versions"] = {name: version(name) for name in (package, "torch", "transformers", "peft")}
    if package == "llamafactory":
        from llamafactory.train.tuner import run_exp

        run_exp(arguments, callbacks=[steps])
    else:
        from swift.pipelines import sft_main
        from swift.template.templates.qwen import Qwen2VLTemplate

        transformers.trainer.DEFAULT_CALLBACKS.append(steps)  # a list that importing ms-swift replaces
        # ms-swift has the ids of the released tokenizer in its code; a random model's small tokenizer has others
        config = transformers.AutoConfig.from_pretrained(arguments["model"])
        Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = config.image_token_id, config.video_token_id

        flags = ((name, value if isinstance(value, list) else [value]) for name, value in arguments.items())
        sft_main([word for name, values in flags for word in (f"--{name}", *map(str, values))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=("llamafactory", "ms-swift"))
    parser.add_argument("folder", type=Path, help="folder of arguments.json, to which the steps are written")
    parser.add_argument("rows", type=int, help="rows of the data")
    arguments = parser.parse_args()
    train_with(arguments.package, arguments.folder, arguments.rows)


if __name__ == "__main__":
    main()
