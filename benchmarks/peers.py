"""Compare fine-tuning of Qwen3-VL by this workflow, LLaMA-Factory and ms-swift: speed, memory, losses.

    python -m venv lf && lf/bin/pip install llamafactory liger-kernel
    python -m venv swift && swift/bin/pip install ms-swift qwen_vl_utils liger-kernel flash-attn-4
    python benchmarks/peers.py --llamafactory lf/bin/python --ms-swift swift/bin/python    # one GPU, 22 GiB left free
    python benchmarks/peers.py tiny --rows auto llamafactory_8 --llamafactory lf/bin/python  # without a GPU

Weights, images and rows are the same as in `vlm_step.py`. `auto` is the workflow's default settings. A peer's row names
the package and the samples in a micro batch. `_liger` uses Liger's kernels, `_recomputed` checkpoints activations, and
`_packed` fills sequences of 4096 tokens with whole samples, so that a step takes other samples, about as many.
Otherwise all runs take the same samples at each step. They start from the same weights, except LoRA's, with the same
rank, optimizer and schedule. The peers' other settings are taken from their examples for Qwen3-VL. Their losses include
the newline after an answer. Rates are medians over the later half of the steps.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "benchmarks")]

import torch  # noqa: E402
from loop import limit_gpu_memory  # noqa: E402
from vlm_step import ROW, make_inputs, measure, parse_steps, read_stage_settings, run_row  # noqa: E402

from dj2mgm.models.generators import load_family  # noqa: E402
from dj2mgm.storage.files import read_json, read_jsonl, write_json, write_jsonl  # noqa: E402
from dj2mgm.training.training_data import ConversationDataset, StepBatches  # noqa: E402

STEPS = 8
SHAPES = ("qwen3-vl-2b-instruct", "tiny")
PACKED_TOKENS = 4096  # length of a packed sequence
VIDEO = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
ROWS = ("auto", "llamafactory_8_liger", "llamafactory_16_liger_recomputed", "llamafactory_packed_liger")
ROWS += ("ms-swift_8_liger", "ms-swift_16_liger_recomputed", "ms-swift_packed_liger")
PEER_ROW = re.compile("(llamafactory|ms-swift)_([1-9][0-9]*|packed)(_liger)?(_recomputed)?")
OFFLINE = ("HF_HUB_OFFLINE=1", "USE_HF=1")  # environment variables, so that no package searches a hub


def parse_row(text: str) -> str:
    """Parse the name of a row; argparse reports the error of an unknown name."""
    if not ROW.fullmatch(text) and not PEER_ROW.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected a row of vlm_step.py, or llamafactory or ms-swift with _N or _packed, to which _liger and "
            f"_recomputed may be added; found {text}"
        )
    return text


def parse_python(text: str) -> str:
    """Parse the Python of an environment and return its full path; argparse reports the error of a missing file."""
    if not (program := shutil.which(text)):
        raise argparse.ArgumentTypeError(f"there is no program {text}; name the Python of the package's environment")
    return os.path.abspath(program)


def write_peers_inputs(folder: Path, settings: dict) -> None:
    """Write the model with the video processor that the peers expect, and the rows in the order of `auto`'s steps."""
    model = folder / "peers_model"
    model.mkdir()
    for path in (folder / "model").iterdir():
        (model / path.name).symlink_to(path)
    write_json(model / "video_preprocessor_config.json", VIDEO)
    rows = list(read_jsonl(folder / "data.jsonl"))
    order = StepBatches([1] * len(rows), 1, settings["global_batch_size"], settings["seed"])._shuffle_samples(0)
    roles = {"human": "user", "gpt": "assistant"}
    messages = (
        {
            "messages": [
                {"role": roles[turn["from"]], "content": turn["value"].replace("<image>\n", "<image>")}
                for turn in row["conversations"]
            ],
            "images": [row["image"]],
        }
        for row in (rows[number] for number in order)
    )
    write_jsonl(folder / "peers.jsonl", messages)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    data = {"file_name": "peers.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    write_json(folder / "dataset_info.json", {"rows": data})


def build_shared_arguments(row: str, output: Path, settings: dict, steps: int) -> dict:
    """Return the arguments of transformers' Trainer, which both peers accept."""
    is_packed, has_gpu = "packed" in row, torch.cuda.is_available()
    micro_batch = 1 if is_packed else int(re.search(r"_(\d+)", row)[1])
    samples = micro_batch * (estimate_samples_in_pack(output.parent) if is_packed else 1)
    return {
        "output_dir": str(output / "trainer"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": max(1, round(settings["global_batch_size"] / samples)),
        "max_steps": steps,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": settings["lr_scheduler"],
        "warmup_steps": settings["warmup_ratio"],
        "weight_decay": settings["weight_decay"],
        "max_grad_norm": settings["max_grad_norm"],
        "adam_beta2": 0.999,
        "bf16": has_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": settings["loader_workers"],
        "seed": settings["seed"],
    } | ({} if has_gpu else {"use_cpu": True})


def estimate_samples_in_pack(folder: Path) -> float:
    """Return the mean number of samples in a packed sequence, estimated from their lengths."""
    encoder = load_family(folder / "model").make_encoder("", PACKED_TOKENS)
    lengths = ConversationDataset(folder / "data.jsonl", encoder).lengths
    return PACKED_TOKENS / (sum(lengths) / len(lengths))


def build_llamafactory_arguments(row: str, folder: Path, settings: dict) -> dict:
    """Return the arguments of examples/train_lora/qwen3vl_lora_sft.yaml, with this comparison's values."""
    lora = settings["lora"]
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "peers_model"),
        "template": "qwen3_vl_nothink",
        "dataset_dir": str(folder),
        "dataset": "rows",
        "cutoff_len": PACKED_TOKENS if "packed" in row else settings["max_length"],
        "neat_packing": "packed" in row,
        "disable_shuffling": True,
        "overwrite_cache": True,
        "preprocessing_num_workers": min(8, os.cpu_count() or 1),
        "finetuning_type": "lora",
        "lora_rank": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "lora_target": ",".join(lora["targets"]),
        "flash_attn": "sdpa",
        # its own flag does not know this model, so Trainer's flag follows
        "enable_liger_kernel": "liger" in row,
        "use_liger_kernel": "liger" in row,
        "disable_gradient_checkpointing": "recomputed" not in row,
    }


def build_swift_arguments(row: str, folder: Path, settings: dict) -> dict:
    """Return the arguments of the guide "Qwen3-VL best practices", with this comparison's values."""
    lora, is_packed = settings["lora"], "packed" in row
    return {
        "model": str(folder / "peers_model"),
        "model_type": "qwen3_vl",
        "template": "qwen3_vl",
        "torch_dtype": "bfloat16",
        "dataset": str(folder / "peers.jsonl"),
        "split_dataset_ratio": 0,
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "load_from_cache_file": False,
        "dataset_num_proc": min(8, os.cpu_count() or 1),
        "max_length": PACKED_TOKENS if is_packed else settings["max_length"],
        "packing": is_packed,
        "attn_impl": "flash_attention_4" if is_packed else "sdpa",
        "tuner_type": "lora",
        "lora_rank": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": lora["targets"],
        "freeze_vit": True,
        "freeze_aligner": True,
        "use_liger_kernel": "liger" in row,
        "gradient_checkpointing": "recomputed" in row,
        "vit_gradient_checkpointing": False,
        "add_version": False,
    }


ARGUMENTS = {"llamafactory": build_llamafactory_arguments, "ms-swift": build_swift_arguments}


def measure_peer(row: str, python: str, folder: Path, settings: dict, steps: int, seconds: float) -> dict:
    """Train as a user of the peer does, and return the row, or the reason why it has no figures."""
    package, output = row.split("_")[0], folder / row
    output.mkdir()
    arguments = build_shared_arguments(row, output, settings, steps) | ARGUMENTS[package](row, folder, settings)
    write_json(output / "arguments.json", arguments)
    rows = steps * settings["global_batch_size"]
    images = read_json(folder / "model/processor_config.json")["image_processor"]
    tokens = images["size"]["longest_edge"] // (images["patch_size"] * images["merge_size"]) ** 2
    command = ["env", *OFFLINE, f"IMAGE_MAX_TOKEN_NUM={tokens}", python]  # ms-swift scales images itself
    command += [PROJECT / "benchmarks/trainer_steps.py", package, output, str(rows)]
    result = run_row(row, command, output, settings["global_batch_size"], seconds)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    result |= {"micro_batch": " × ".join(str(arguments[name]) for name in names)}
    if "failed" in result:
        result["reason"] = find_last_error((output / "log").read_text(encoding="utf-8")) or result["failed"]
    else:
        result |= {"versions": read_json(output / "metrics.json")["versions"]}
    return result


def find_last_error(log: str) -> str | None:
    """Return the first sentence of the last exception in a log, or None."""
    errors = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception): .+)$", log, re.MULTILINE)
    return re.split(r"\. ", errors[-1])[0] if errors else None


def format_table(rows: list[dict]) -> str:
    lines = ["| | micro batch × accumulation | samples/s | GPU memory: allocated, reserved (GiB) | losses |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        cells = [row["row"], str(row.get("micro_batch", ""))]
        if "failed" in row:
            cells += ["", "", row.get("reason", "failed")]
        else:
            losses = row["losses"]
            shown_losses = [losses[0], losses[len(losses) // 2], losses[-1]] if len(losses) > 3 else losses
            memory = f"{row['peak_gpu_gib']}, {row['peak_gpu_reserved_gib']}"
            cells += [f"{row['samples_per_second']}", memory, ", ".join(f"{loss:.3f}" for loss in shown_losses)]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default=SHAPES[0])
    for flag, package in (("--llamafactory", "LLaMA-Factory"), ("--ms-swift", "ms-swift")):
        python_help = f"Python of an environment with {package}"
        parser.add_argument(flag, type=parse_python, metavar="PYTHON", help=python_help)
    parser.add_argument("--rows", nargs="+", type=parse_row, default=ROWS, help=f"default: {' '.join(ROWS)}")
    parser.add_argument("--steps", type=parse_steps, default=STEPS)
    parser.add_argument("--gpu-gib", type=float, default=22.0, help="GiB of GPU memory left free (default: 22)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of a peer's row (default: 120)")
    parser.add_argument(
        "--folder", type=Path, help="keeps inputs and logs, for more rows (default: a temporary folder)"
    )
    arguments = parser.parse_args()
    pythons = {"llamafactory": arguments.llamafactory, "ms-swift": arguments.ms_swift}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "dataset_info.json").exists():
            make_inputs(arguments.shape, folder, arguments.steps)
            write_peers_inputs(folder, read_stage_settings(folder))
        settings, rows = read_stage_settings(folder), []
        with limit_gpu_memory(arguments.gpu_gib):
            for row in arguments.rows:
                shutil.rmtree(folder / row, ignore_errors=True)
                package = row.split("_")[0]
                if package not in ARGUMENTS:
                    result = measure(row, folder)
                elif python := pythons[package]:
                    result = measure_peer(row, python, folder, settings, arguments.steps, arguments.seconds)
                else:
                    result = {"row": row, "failed": 1, "reason": f"not measured, because --{package} is not given"}
                print(json.dumps(result), flush=True)
                rows.append(result)
    print(format_table(rows))


if __name__ == "__main__":
    main()
