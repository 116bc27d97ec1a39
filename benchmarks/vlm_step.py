"""Compare fine-tuning of vision-language models by this workflow and by transformers' Trainer: speed, memory, losses.

    python benchmarks/vlm_step.py qwen3-vl-2b-instruct    # on one GPU with 22 GiB left free
    python benchmarks/vlm_step.py smolvlm2-2.2b-instruct --rows auto peer_4 peer_8_recomputed
    python benchmarks/vlm_step.py llava-1.5-7b-hf --rows auto_nf4 --steps 6
    python benchmarks/vlm_step.py tiny                    # without a GPU, to try the script

Weights are random, images have 640×480 pixels, instructions have realistic lengths, and the global batch is 128.
`auto`, `auto_fp8` and `auto_nf4` are the workflow's default settings, with frozen layers in 16, 8 or 4 bits. `peer_4`
is transformers' Trainer with PEFT, with four samples at a time, and with Liger unless it is missing or fails.
`_recomputed` checkpoints the activations of every layer, and `_grouped` puts samples of similar length together. All
runs start from the same weights, except LoRA's, and take the same samples at each step. Rates are medians over the
later half of the steps.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SCRIPTS = PROJECT / "workflow_scripts"
sys.path[:0] = [str(SCRIPTS), str(PROJECT / "tests/support"), str(PROJECT / "benchmarks")]
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402
import transformers as T  # noqa: E402
from loop import limit_gpu_memory, parse_count  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from random_vlm import SHAPES  # noqa: E402
from trainer_steps import Steps  # noqa: E402

from dj2mgm.models.generators import load_family  # noqa: E402
from dj2mgm.models.vlm.vlm_family import supports_sdpa  # noqa: E402
from dj2mgm.runs.all_runs import Runs  # noqa: E402
from dj2mgm.runs.experiments import REFERENCE  # noqa: E402
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_yaml  # noqa: E402
from dj2mgm.training.training_data import ConversationDataset, StepBatches  # noqa: E402
from random_mgm import measure_instruction_lengths, write_conversations  # noqa: E402

STEPS = 14
ONE_EPOCH = {"epochs": 1, "min_steps": 0, "save_steps": 1_000_000}  # no checkpoint is written
SHIPPED = {"internvl3_5-2b-hf": "internvl3.5-2b"}  # files in config/models that state settings of a shape's model
ROWS = ("auto", "auto_fp8", "peer_4", "peer_8", "peer_8_recomputed", "peer_16_recomputed")
ROW = re.compile("auto(_fp8|_nf4)?|peer_[1-9][0-9]*(_recomputed)?(_grouped)?")
MIN_STEPS = 2  # a rate is the time between two steps


def parse_row(text: str) -> str:
    """Parse the name of a row; argparse reports the error of an unknown name."""
    if not ROW.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"expected auto, auto_fp8, auto_nf4 or peer_N, to which _recomputed and _grouped may be added; found {text}"
        )
    return text


def parse_steps(text: str) -> int:
    """Parse a number of steps that is enough to measure; argparse reports the error of another text."""
    return parse_count(text, MIN_STEPS)


def make_inputs(shape: str, folder: Path, steps: int) -> None:
    subprocess.run([sys.executable, PROJECT / "benchmarks/random_vlm.py", shape, folder], check=True)
    shutil.copytree(PROJECT / "config", folder / "config")
    shipped = read_yaml(PROJECT / f"config/models/{SHIPPED[shape]}.yaml") if shape in SHIPPED else {}
    model = {"transformers": "model", "clip": "model", "settings": shipped.get("settings", {})}
    write_yaml(folder / "config/models/random.yaml", model)
    split = {"file": "captions.jsonl", "images": "images"}
    write_yaml(folder / "config/datasets/random.yaml", dict.fromkeys(("pretrain", "finetune", "evaluation"), split))
    settings = read_stage_settings(folder)
    write_conversations(folder / "data.jsonl", measure_instruction_lengths(steps * settings["global_batch_size"]))


def read_stage_settings(folder: Path, gpus: int = 1) -> dict:
    os.chdir(folder)
    try:
        runs = Runs({"model": "random", "dataset": "random", "gpus": gpus})
        stage = runs.first_seed(REFERENCE).settings["finetune"]
        return stage.file_content() | ONE_EPOCH | {"loader_workers": stage.workers}  # a number for all rows
    finally:
        os.chdir(PROJECT)


def measure(row: str, folder: Path, gpus: int = 1, dropout: float | None = None, growth: int = 1) -> dict:
    """Train in the workflow's own stage, or as peers do, and return the row.

    `dropout` replaces LoRA's; the global batch is `growth` times as large as by default.
    """
    output = folder / "_".join([row, *(str(number) for number in (gpus, growth) if number > 1)])
    output.mkdir()
    settings = read_stage_settings(folder, gpus)
    settings["global_batch_size"] *= growth
    if dropout is not None:
        settings["lora"] = dict(settings["lora"]) | {"dropout": dropout}
    if row in ("auto_fp8", "auto_nf4"):
        settings["precision"] = row.removeprefix("auto_")
        choices = {name: c for name, c in settings["deepspeed_choices"].items() if c["zero_optimization"]["stage"] < 3}
        settings["deepspeed_choices"] = choices
    write_yaml(output / "config.yaml", settings | {"log_steps": 1})
    command = ["bash", SCRIPTS / "launch.sh", str(gpus), "1", SCRIPTS / "finetune.py"]
    command += ["--config", output / "config.yaml"]
    command += ["--data", folder / "data.jsonl", "--model", folder / "model", "--output-dir", output]
    if not row.startswith("peer"):
        return run_row(row, command, output, settings["global_batch_size"])
    command = [sys.executable, __file__, "--peer", row, "--folder", folder]
    result = run_row(row, command, output, settings["global_batch_size"])
    if "failed" in result and has_liger():  # Liger 0.8.5 expects older transformers for Qwen3-VL and PaliGemma
        result = run_row(row, [*command, "--without-liger"], output, settings["global_batch_size"])
        result["liger"] = False
    return result


def has_liger() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


def run_row(row: str, command: list, output: Path, samples: int, seconds: float | None = None) -> dict:
    """Run a training that writes its steps to `output`, and return its row.

    Args:
        row: name of the row.
        command: the command and its arguments.
        output: folder of the log, `metrics.jsonl` and `metrics.json`.
        samples: samples of a step, unless `metrics.json` has another number.
        seconds: time after which the training is stopped; the row then has the steps until there.
    """
    start = time.monotonic()
    with open(output / "log", "w", encoding="utf-8") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = 0
    log_end = (output / "log").read_text(encoding="utf-8").splitlines()[-12:]
    if status:
        return {"row": row, "failed": f"exit status {status}", "log": log_end}
    steps = list(read_jsonl(output / "metrics.jsonl")) if (output / "metrics.jsonl").exists() else []
    times = [after["seconds"] - before["seconds"] for before, after in zip(steps, steps[1:], strict=False)]
    if not times:
        limit = f" within {seconds:.0f} s" if seconds else ""
        return {"row": row, "failed": f"fewer than two steps{limit}", "log": log_end}
    metrics = read_json(output / "metrics.json")
    rate = metrics.get("samples_per_step", samples) / statistics.median(times[len(times) // 2 :])
    result = {"row": row, "samples_per_second": round(rate, 1), "step_seconds": [round(t, 2) for t in times]}
    result |= {key: metrics[key] for key in ("peak_gpu_gib", "peak_gpu_reserved_gib", "peak_host_rss_gib")}
    result |= {"seconds": round(time.monotonic() - start, 1), "losses": [round(step["loss"], 4) for step in steps]}
    if plan := metrics.get("memory_plan"):
        result |= {"planned_gpu_gib": plan["gpu_gib"], "micro_batch": metrics["engine"]["micro_batch_size"]}
        result |= {"recomputed": metrics["activation_checkpointing"], "zero": metrics["engine"]["zero_stage"]}
    return result


def train_as_peers_do(row: str, folder: Path, liger: bool) -> None:
    """Train as a careful user of transformers would: processor, collator, labels at answers, bf16, PEFT, Liger."""
    settings, output = read_yaml(folder / row / "config.yaml"), folder / row
    micro_batch, lora = int(re.search(r"\d+", row)[0]), settings["lora"]
    dataset = ConversationDataset(
        folder / "data.jsonl", load_family(folder / "model").make_encoder("", settings["max_length"])
    )
    order = StepBatches(dataset.lengths, 1, settings["global_batch_size"], settings["seed"])._shuffle_samples(0)
    attention = "sdpa" if supports_sdpa(T.AutoConfig.from_pretrained(folder / "model")) else "eager"
    model = T.AutoModelForImageTextToText.from_pretrained(
        folder / "model", dtype=torch.bfloat16, attn_implementation={"text_config": attention}
    )
    target_names = "|".join(lora["targets"])
    [decoder] = [name for name, module in model.named_modules() if module is model.get_decoder()]
    targets = rf"{re.escape(decoder)}\..*\.({target_names})"
    lora = LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], target_modules=targets)
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    arguments = T.TrainingArguments(
        output_dir=str(output / "trainer"),
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=settings["global_batch_size"] // micro_batch,
        num_train_epochs=1,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=settings["lr_scheduler"],
        warmup_steps=settings["warmup_ratio"],
        gradient_checkpointing="recomputed" in row,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=liger,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=settings["loader_workers"],
        train_sampling_strategy="group_by_length" if "grouped" in row else "sequential",
        seed=settings["seed"],
    )
    samples = torch.utils.data.Subset(dataset, order)
    T.Trainer(model, arguments, partial(collate, dataset.encoder), samples, callbacks=[Steps(output)]).train()


def collate(encoder, items: list[dict]) -> dict[str, torch.Tensor]:
    batch = encoder.batch(items, max(len(item["input_ids"]) for item in items))
    batch["attention_mask"] = torch.tensor(
        [[n < len(item["input_ids"]) for n in range(batch["input_ids"].shape[1])] for item in items], dtype=torch.long
    )
    return {name: values for name, values in batch.items() if name != "answer_positions"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=parse_row, default=ROWS, help=f"default: {' '.join(ROWS)}")
    parser.add_argument("--steps", type=parse_steps, default=STEPS)
    parser.add_argument("--gpu-gib", type=float, default=22.0, help="GiB of GPU memory left free (default: 22)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--without-liger", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        liger = has_liger() and not arguments.without_liger
        train_as_peers_do(arguments.peer, arguments.folder, liger)
        return
    if arguments.shape is None:
        parser.error(f"name a shape: {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as temporary:
        make_inputs(arguments.shape, Path(temporary), arguments.steps)
        with limit_gpu_memory(arguments.gpu_gib):
            for row in arguments.rows:
                print(json.dumps({"shape": arguments.shape} | measure(row, Path(temporary))), flush=True)


if __name__ == "__main__":
    main()
