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
sys.path[:0] = [str(SCRIPTS), str(PROJECT / "tests/support")]

from dj2mgm.storage.files import read_json, write_yaml  # noqa: E402
from mgm_stages import TEXT_TOKENS, answer, build_training_settings  # noqa: E402
from random_mgm import make_random_mgm, write_conversations  # noqa: E402

SAMPLES = 96


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
            write_yaml(folder / f"{stage}.yaml", build_training_settings(stage, template, image_tokens))
        shared_inputs = ["--data", data, "--model", model]
        print(json.dumps(train("pretrain", folder, *shared_inputs)), flush=True)
        projector = ["--projector", folder / "pretrain" / "projector.safetensors"]
        print(json.dumps(train("finetune", folder, *shared_inputs, *projector)), flush=True)
        print(json.dumps(answer_and_score(folder)))


if __name__ == "__main__":
    main()
