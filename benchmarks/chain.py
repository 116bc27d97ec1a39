"""Run both training stages, answers and scores at the shape of MGM-2B; kill and resume each training stage once.

    python benchmarks/chain.py                   # on one GPU
    python benchmarks/chain.py --shape tiny      # without a GPU

It makes a random model and conversations in a temporary folder, and runs Snakemake's commands: launch.sh with
pretrain.py and finetune.py (ZeRO-2 and ZeRO-3, both with offload and activation checkpointing of every layer), then
generate_answers.py and evaluate_vqa.py. Each training stage is killed (SIGKILL) after its first checkpoint and started
again. Time and memory of each stage are printed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SCRIPTS = PROJECT / "workflow_scripts"
sys.path[:0] = [str(SCRIPTS), str(PROJECT / "benchmarks")]

from random_mgm import WORDS, make_random_mgm, write_conversations  # noqa: E402

from dj2mgm.settings.deepspeed_files import read_deepspeed  # noqa: E402
from dj2mgm.storage.files import read_json, read_yaml, write_jsonl, write_yaml  # noqa: E402

SAMPLES, TEXT_TOKENS = 96, 64
SMALL = {"global_batch_size": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 8, "save_steps": 2}
DEEPSPEED = {"pretrain": "zero2_offload", "finetune": "zero3_offload"}


def training_settings(stage: str, template: str, image_tokens: int) -> dict:
    settings = read_yaml(PROJECT / "config" / "config.yaml")[stage] | SMALL
    settings |= {"seed": 0, "gpus": 1, "cpu_threads": None, "template": template}
    settings["max_length"] = image_tokens + TEXT_TOKENS
    settings |= {"deepspeed": read_deepspeed(DEEPSPEED[stage], stage), "activation_checkpointing": True}
    return settings


def train(stage: str, folder: Path, *inputs: str | Path) -> dict:
    """Run a stage under the launcher, kill it once it has a checkpoint, and run the same command again."""
    output = folder / stage
    command = ["bash", SCRIPTS / "launch.sh", "1", "1", SCRIPTS / f"{stage}.py"]
    command += ["--config", folder / f"{stage}.yaml", *inputs, "--output-dir", output]
    with open(folder / f"{stage}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        while not list(output.glob("checkpoints/checkpoint-*/complete.json")):
            if process.poll() is not None:
                raise SystemExit(f"{stage} ended before its first checkpoint; see {log.name}")
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        start = time.monotonic()
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    metrics = read_json(output / "metrics.json")
    return {
        "stage": stage,
        "resumed_from": metrics["resumed_from"],
        "steps": metrics["steps"],
        "loss": [round(metrics["loss_first"], 3), round(metrics["loss_last"], 3)],
        "seconds_after_the_kill": round(time.monotonic() - start, 1),
        "gpu_reserved_gib": metrics["peak_gpu_reserved_gib"],
        "host_rss_gib": metrics["peak_host_rss_gib"],
        "engine": metrics["engine"],
    }


def answer(folder: Path, stages: Path, output: Path, gpus: int = 1) -> None:
    """Generate captions and answers for a few images with both stages; write them into the folder `output`."""
    output.mkdir(exist_ok=True)
    rows = [
        {
            "id": str(index),
            "image": f"{index}.jpg",
            "captions": [" ".join(WORDS[:3])],
            "questions": [{"type": "word", "question": WORDS[0], "answer": WORDS[1]}],
        }
        for index in range(8)
    ]
    write_jsonl(output / "evaluation.jsonl", rows)
    templates = {"pretrain": {"template": "plain", "question": ""}, "finetune": {"template": "gemma", "question": "?"}}
    settings = {
        "seed": 0,
        "cpu_threads": None,
        "gpus": gpus,
        "image_root": str(folder / "images"),
        "template": "gemma",
        "question_prompt": "{question}",
        "captions": templates,
        "decoding": {"batch_size": 8, "max_new_tokens": 16},
    }
    write_yaml(output / "config.yaml", settings)
    flags = ["--config", output / "config.yaml", "--model", folder / "mgm", "--output-dir", output]
    flags += ["--evaluation", output / "evaluation.jsonl"]
    flags += ["--pretrained", stages / "pretrain", "--finetuned", stages / "finetune"]
    subprocess.run([sys.executable, SCRIPTS / "generate_answers.py", *flags], check=True)


def answer_and_score(folder: Path) -> dict:
    """Generate and score captions and answers."""
    start = time.monotonic()
    answer(folder, folder, folder / "generate")
    flags = ["--answers", folder / "generate" / "answers.jsonl", "--output-dir", folder / "evaluate_vqa"]
    subprocess.run([sys.executable, SCRIPTS / "evaluate_vqa.py", *flags], check=True)
    question_count = read_json(folder / "evaluate_vqa" / "metrics.json")["questions"]
    return {
        "stage": "generate and evaluate",
        "seconds": round(time.monotonic() - start, 1),
        "questions": question_count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["mgm-2b", "tiny"], default="mgm-2b")
    parser.add_argument("--folder", type=Path, help="keep all files in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        model, data = folder / "mgm", folder / "conversations.jsonl"
        image_tokens = make_random_mgm(arguments.shape, folder)
        write_conversations(data, [(8, TEXT_TOKENS)] * SAMPLES)
        for stage, template in (("pretrain", "plain"), ("finetune", "gemma")):
            write_yaml(folder / f"{stage}.yaml", training_settings(stage, template, image_tokens))
        shared_inputs = ["--data", data, "--model", model]
        print(json.dumps(train("pretrain", folder, *shared_inputs)), flush=True)
        projector = ["--projector", folder / "pretrain" / "projector.safetensors"]
        print(json.dumps(train("finetune", folder, *shared_inputs, *projector)), flush=True)
        print(json.dumps(answer_and_score(folder)))


if __name__ == "__main__":
    main()
