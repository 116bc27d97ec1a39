"""Training shared by two processes, as it would be by two GPUs; and a checkpoint of two does not serve one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import PROJECT
from small_project import Project, copy_project

from files import read_json, read_jsonl, write_yaml

sys.path.append(str(PROJECT / "benchmarks"))
from chain import training_settings  # noqa: E402
from random_mgm import make_random_mgm, write_conversations  # noqa: E402

SAMPLES, TEXT_TOKENS, TIMEOUT_S = 80, 40, 300
ENVIRONMENT = Project(PROJECT).environment()
TEMPLATES = {"pretrain": "plain", "finetune": "gemma"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A random tiny model with a stage-1 projector, conversations, and the settings of both stages."""
    folder = tmp_path_factory.mktemp("inputs")
    image_tokens = make_random_mgm("tiny", folder)
    write_conversations(folder / "conversations.jsonl", SAMPLES, 8, TEXT_TOKENS)
    for stage, template in TEMPLATES.items():
        for processes in (1, 2):
            settings = training_settings(stage, template, image_tokens) | {
                "gpus": processes,
                "gradient_accumulation_steps": 8 // processes,
                "max_length": image_tokens + TEXT_TOKENS,
                "cpu_threads": 1,
                "loader_workers": 0,
            }
            if stage == "finetune":
                settings["lora"] |= {"dropout": 0.0}  # which is another one in each process
            write_yaml(folder / f"{stage}-{processes}.yaml", settings)
    return folder


def command(inputs, stage: str, processes: int, output) -> list[str]:
    flags = ["--config", inputs / f"{stage}-{processes}.yaml", "--data", inputs / "conversations.jsonl"]
    flags += ["--model", inputs / "mgm", "--output-dir", output]
    if stage == "finetune":
        flags += ["--projector", inputs / "projector.safetensors"]
    launch = ["bash", PROJECT / "workflow_scripts/launch.sh", processes, 1]
    return list(map(str, [*launch, PROJECT / "workflow_scripts" / f"{stage}.py", *flags]))


def train(inputs, stage: str, processes: int, output) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(inputs, stage, processes, output), env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def losses(output) -> list[float]:
    return [row["loss"] for row in read_jsonl(output / "metrics.jsonl")]


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_*"))


def stays(left: set[Path]) -> bool:
    """Whether any of it does: what another run on this machine has there is gone within seconds."""
    deadline = time.monotonic() + 60
    while left & shared_memory() and time.monotonic() < deadline:
        time.sleep(0.5)
    return bool(left & shared_memory())


@pytest.fixture(scope="module")
def alone(inputs):
    """By stage: the losses of one process."""
    found = {}
    for stage in TEMPLATES:
        done = train(inputs, stage, 1, inputs / stage)
        assert done.returncode == 0, done.stderr[-3000:]
        found[stage] = losses(inputs / stage)
    return found


def test_two_processes_have_the_losses_of_one_in_stage_1_and_divide_the_optimizer(inputs, alone, tmp_path):
    done = train(inputs, "pretrain", 2, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    engine = read_json(tmp_path / "metrics.json")["engine"]
    assert (engine["world_size"], engine["zero_stage"], engine["global_batch_size"]) == (2, 2, 16)
    assert losses(tmp_path) == pytest.approx(alone["pretrain"], rel=1e-4)


def test_two_killed_processes_leave_no_memory_and_resume_and_one_refuses_their_checkpoint(inputs, alone, tmp_path):
    before = shared_memory()
    with open(tmp_path / "killed.log", "w") as log:
        killed = subprocess.Popen(
            command(inputs, "finetune", 2, tmp_path), env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + TIMEOUT_S
    while not list(tmp_path.glob("checkpoints/checkpoint-*/complete.json")):
        assert killed.poll() is None and time.monotonic() < deadline, (tmp_path / "killed.log").read_text()[-3000:]
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not stays(shared_memory() - before)

    refused = train(inputs, "finetune", 1, tmp_path)
    assert refused.returncode != 0
    assert "was written by 2 processes" in refused.stderr + refused.stdout
    assert "set gpus: 2 to resume from step" in refused.stderr + refused.stdout

    resumed = train(inputs, "finetune", 2, tmp_path)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    metrics = read_json(tmp_path / "metrics.json")
    assert metrics["resumed_from"] and metrics["engine"]["world_size"] == 2 and metrics["engine"]["zero_stage"] == 3
    assert losses(tmp_path) == pytest.approx(alone["finetune"], rel=1e-3)


def test_several_nodes_without_slurm_are_refused_with_the_way_to_have_them():
    launch = ["bash", PROJECT / "workflow_scripts/launch.sh", "2", "2", "script.py"]
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    refused = subprocess.run(launch, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: nodes: 2 needs Slurm (snakemake --profile profiles/slurm)")


def test_gpus_that_nodes_cannot_share_are_refused_before_anything_runs(tmp_path):
    said = copy_project(tmp_path).run("baseline", "--dry-run", config=("gpus=3", "nodes=2"), ok=False)
    assert "gpus: 3 cannot be shared evenly by nodes: 2" in said
