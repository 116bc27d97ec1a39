"""Training and answers on two GPUs equal those on one, also after a kill; each process uses one GPU.

python -m pytest tests/gpu/test_several_gpus.py    # takes two minutes; skipped with fewer GPUs
"""

import csv
import os
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pynvml
import pytest
import torch

from dj2mgm.settings.training_stages import read_deepspeed
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_yaml
from mgm_stages import answer, build_training_settings
from paths import PROJECT
from random_mgm import make_random_mgm, write_conversations

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SCRIPTS = PROJECT / "workflow_scripts"
TEXT_TOKENS = 40
TEMPLATES = {"pretrain": "plain", "finetune": "gemma"}
# without DeepSpeed's CPU optimizer, which takes a minute to compile
DEEPSPEED = {"pretrain": "zero1", "finetune": "zero3"}
GPUS = (1, 2)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Make a random tiny model with a projector, conversations and the settings of both stages."""
    folder = tmp_path_factory.mktemp("inputs")
    image_tokens = make_random_mgm("tiny", folder)
    write_conversations(folder / "conversations.jsonl", [(8, TEXT_TOKENS)] * 96)
    for stage, template in TEMPLATES.items():
        for gpus in GPUS:
            settings = build_training_settings(stage, template, image_tokens)
            settings |= {"gpus": gpus, "gradient_accumulation_steps": 8 // gpus, "compile": False}
            settings["deepspeed"] = read_deepspeed(DEEPSPEED[stage], stage)
            if stage == "finetune":
                settings["lora"] |= {"dropout": 0.0}  # which is another one in each process
            write_yaml(folder / f"{stage}-{gpus}.yaml", settings)
    return folder


def start(inputs: Path, stage: str, gpus: int, script: Path | None = None) -> subprocess.Popen:
    """Start a stage; `script` replaces the stage's, and then its output has the script's name."""
    name = script.stem if script else stage
    output = inputs / f"{gpus}" / name
    output.mkdir(parents=True, exist_ok=True)
    command = ["bash", SCRIPTS / "launch.sh", str(gpus), "1", script or SCRIPTS / f"{stage}.py"]
    command += ["--config", inputs / f"{name}-{gpus}.yaml", "--data", inputs / "conversations.jsonl"]
    command += ["--model", inputs / "mgm", "--output-dir", output]
    command += ["--projector", inputs / "projector.safetensors"] if stage == "finetune" else []
    path = os.pathsep.join([str(SCRIPTS), str(PROJECT / "tests/support"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "FULL_GPU_FILE": str(output / "full")}
    with open(inputs / f"{name}-{gpus}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment)


def kill_after_checkpoint(process: subprocess.Popen, output: Path) -> None:
    while not list(output.glob("checkpoints/checkpoint-*/complete.json")):
        assert process.poll() is None, "the stage ended before its first checkpoint"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def trained(inputs):
    """Train both stages on one and two GPUs at the same time; those on two are killed and started again."""
    running = {(stage, gpus): start(inputs, stage, gpus) for stage in TEMPLATES for gpus in GPUS}
    for stage in TEMPLATES:
        kill_after_checkpoint(running[stage, 2], inputs / "2" / stage)
        running[stage, 2] = start(inputs, stage, 2)
    for (stage, gpus), process in running.items():
        assert process.wait() == 0, (inputs / f"{stage}-{gpus}.log").read_text(encoding="utf-8")[-3000:]
    return inputs


@pytest.mark.parametrize("stage", TEMPLATES)
def test_losses_on_two_gpus_equal_one_gpu_after_a_kill(stage, trained):
    alone, shared = ([row["loss"] for row in read_jsonl(trained / f"{n}/{stage}/metrics.jsonl")] for n in GPUS)
    metrics = read_json(trained / f"2/{stage}/metrics.json")
    assert metrics["resumed_from"] and metrics["engine"]["world_size"] == 2
    assert shared == pytest.approx(alone, rel=1e-3)


def test_answers_on_two_gpus_equal_those_on_one(trained):
    answers = {}
    for gpus in GPUS:
        output = trained / f"generate-{gpus}"
        answer(trained, trained / "1", output, gpus)
        answers[gpus] = [list(read_jsonl(output / f"{name}.jsonl")) for name in ("captions", "answers")]
    assert answers[1] == answers[2]


@pytest.fixture(scope="module")
def resumed(inputs, trained):
    """Train alone on two GPUs, of which the second runs out of memory once; return the GPUs of each process, too."""
    settings = read_yaml(inputs / "pretrain-2.yaml")
    sizes = {"micro_batch_size": "auto", "gradient_accumulation_steps": "auto", "save_steps": 1}
    write_yaml(inputs / "full_gpu-2.yaml", settings | sizes)
    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    gpus_by_process = defaultdict(set)
    process = start(inputs, "pretrain", 2, PROJECT / "tests/support/full_gpu.py")
    while process.poll() is None:
        for index, gpu in enumerate(gpus):
            for user in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                gpus_by_process[user.pid].add(index)
        time.sleep(0.05)
    assert process.returncode == 0, (inputs / "full_gpu-2.log").read_text(encoding="utf-8")[-3000:]
    return inputs / "2/full_gpu", gpus_by_process


def test_each_process_uses_one_gpu(resumed):
    folder, gpus_by_process = resumed
    assert sorted(map(sorted, gpus_by_process.values())) == [[0], [1]]
    with open(folder / "memory.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "training"]
    peaks = [max(float(row[f"gpu{index}_gib"]) for row in rows) for index in range(2)]
    assert peaks[0] == pytest.approx(peaks[1], abs=0.2)


def test_a_full_gpu_of_two_resumes_in_the_same_command(resumed, trained):
    folder, _ = resumed
    metrics = read_json(folder / "metrics.json")
    assert metrics["resumed_from"] == "checkpoint-2" and metrics["engine"]["world_size"] == 2
    losses = [[row["loss"] for row in read_jsonl(path / "metrics.jsonl")] for path in (folder, trained / "1/pretrain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
