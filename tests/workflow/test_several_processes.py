"""Training on two processes, like on two GPUs; one process cannot resume their checkpoint."""

import os
import re
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_jsonl, write_yaml
from mgm_stages import build_training_settings
from paths import PROJECT
from random_mgm import make_random_mgm, write_conversations
from small_project import Project, copy_project

SAMPLES, TEXT_TOKENS, TIMEOUT_S = 80, 40, 300
ENVIRONMENT = Project(PROJECT).environment(forked=False)
TEMPLATES = {"pretrain": "plain", "finetune": "gemma"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Make a random tiny model with a stage-1 projector, conversations, and the settings of both stages."""
    folder = tmp_path_factory.mktemp("inputs")
    image_tokens = make_random_mgm("tiny", folder)
    write_conversations(folder / "conversations.jsonl", [(8, TEXT_TOKENS)] * SAMPLES)
    for stage, template in TEMPLATES.items():
        for processes in (1, 2):
            settings = build_training_settings(stage, template, image_tokens) | {
                "gpus": processes,
                "gradient_accumulation_steps": 8 // processes,
                "max_length": image_tokens + TEXT_TOKENS,
                "cpu_threads": 1,
                "loader_workers": 0,
            }
            if stage == "finetune":
                settings["lora"] |= {"dropout": 0.0}  # a different one in each process
            write_yaml(folder / f"{stage}-{processes}.yaml", settings)
    return folder


def flags(inputs, stage: str, processes: int, output) -> dict:
    arguments = {"--config": inputs / f"{stage}-{processes}.yaml", "--data": inputs / "conversations.jsonl"}
    arguments |= {"--model": inputs / "mgm", "--output-dir": output}
    return arguments | ({"--projector": inputs / "projector.safetensors"} if stage == "finetune" else {})


def command(inputs, stage: str, processes: int, output) -> list[str]:
    launch = ["bash", PROJECT / "workflow_scripts/launch.sh", processes, 1]
    arguments = [word for flag in flags(inputs, stage, processes, output).items() for word in flag]
    return list(map(str, [*launch, PROJECT / "workflow_scripts" / f"{stage}.py", *arguments]))


def train(inputs, stage: str, processes: int, output) -> subprocess.CompletedProcess:
    arguments = command(inputs, stage, processes, output)
    return subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)


def read_losses(output) -> list[float]:
    return [row["loss"] for row in read_jsonl(output / "metrics.jsonl")]


def list_shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_*"))


def remains(files: set[Path]) -> bool:
    """Return whether one of the files remains; files of other runs on this machine disappear within seconds."""
    deadline = time.monotonic() + 60
    while files & list_shared_memory() and time.monotonic() < deadline:
        time.sleep(0.5)
    return bool(files & list_shared_memory())


@pytest.fixture(scope="module")
def alone(inputs, forks):
    """Return a function that trains a stage on one process and returns its losses."""

    @cache
    def train_alone(stage: str) -> list[float]:
        ended = forks.run(f"{stage}.py", flags(inputs, stage, 1, inputs / stage))
        assert ended.ok, ended.printed[-3000:]
        return read_losses(inputs / stage)

    return train_alone


@pytest.mark.slow
def test_losses_on_two_launched_processes_equal_one(inputs, alone, tmp_path):
    process = train(inputs, "pretrain", 2, tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    engine = read_json(tmp_path / "metrics.json")["engine"]
    assert (engine["world_size"], engine["zero_stage"], engine["global_batch_size"]) == (2, 2, 16)
    assert read_losses(tmp_path) == pytest.approx(alone("pretrain"), rel=1e-4)


@pytest.mark.slow
def test_micro_batches_without_images_do_not_change_losses(inputs, forks, tmp_path):
    """Train on micro batches without an image, in which DeepSpeed would reuse the last step's gradient.

    Every second row is text only, and a micro batch has one row.
    """
    rows = list(read_jsonl(inputs / "conversations.jsonl"))[:12]
    for row in rows[::2]:
        row["conversations"][0]["value"] = row["conversations"][0]["value"].replace("<image>\n", "")
        del row["image"]
    write_jsonl(inputs / "mixed.jsonl", rows)
    results = {}
    for micro_batch, processes in ((4, 1), (1, 1), (1, 2)):
        accumulation = 4 // micro_batch // processes
        sizes = {"global_batch_size": 4, "micro_batch_size": micro_batch}
        sizes["gradient_accumulation_steps"] = accumulation
        output = tmp_path / f"{micro_batch} {processes}"
        write_yaml(inputs / "mixed.yaml", read_yaml(inputs / f"finetune-{processes}.yaml") | sizes)
        mixed = {"--config": inputs / "mixed.yaml", "--data": inputs / "mixed.jsonl"}
        ended = forks.run("finetune.py", flags(inputs, "finetune", processes, output) | mixed, processes)
        assert ended.ok, ended.printed[-3000:]
        results[micro_batch, processes] = read_losses(output), load_file(output / "projector.safetensors")
    before = load_file(inputs / "projector.safetensors")
    expected_losses, expected = results.pop((4, 1))
    # a key's bias has no effect on softmax, so its gradient is rounding error
    trained_names = [key for key in expected if not re.fullmatch(r"patch_info_mining.key.\d.bias", key)]
    for losses, weights in results.values():
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        for key in trained_names:
            change = (expected[key] - before[key]).norm()
            assert (weights[key] - expected[key]).norm() < 0.01 * change, key


def launch_and_kill(arguments: list[str], output: Path) -> None:
    """Start a training, and kill it after its first checkpoint."""
    with open(output / "killed.log", "w") as log:
        process = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not list(output.glob("checkpoints/checkpoint-*/complete.json")):
        assert process.poll() is None and time.monotonic() < deadline, (output / "killed.log").read_text()[-3000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow  # tests/unit/training/test_resume.py kills two processes of a smaller training
def test_two_killed_processes_resume_and_one_cannot(inputs, forks, alone, tmp_path):
    before = list_shared_memory()
    launch_and_kill(command(inputs, "finetune", 2, tmp_path), tmp_path)
    assert not remains(list_shared_memory() - before)

    refused = forks.run("finetune.py", flags(inputs, "finetune", 1, tmp_path))
    assert not refused.ok
    assert "was written by 2 processes" in refused.printed
    assert "Set gpus: 2 to resume from step" in refused.printed

    resumed = forks.run("finetune.py", flags(inputs, "finetune", 2, tmp_path), processes=2)
    assert resumed.ok, resumed.printed[-3000:]
    metrics = read_json(tmp_path / "metrics.json")
    assert metrics["resumed_from"] and metrics["engine"]["world_size"] == 2 and metrics["engine"]["zero_stage"] == 3
    assert read_losses(tmp_path) == pytest.approx(alone("finetune"), rel=1e-3)


@pytest.mark.parametrize(
    ("visible", "processes", "seen"),
    [
        pytest.param(None, 2, "0,1", marks=pytest.mark.slow),
        ("GPU-8f2e,GPU-11ab,GPU-4c07", 2, "GPU-8f2e,GPU-11ab"),
        (None, 1, "0"),
        ("GPU-8f2e,GPU-11ab", 1, "GPU-8f2e"),
        ("", 1, ""),
    ],
)
def test_processes_use_their_assigned_devices(tmp_path, visible, processes, seen):
    """The launcher imports nothing from the working folder."""
    for module in ("random", "types", "socket", "json", "base64", "deepspeed", "torch"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported from the working folder')")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/script.py"
    script.write_text("import os; print('sees ' + repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    done = launch_script(script, processes, visible, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sees {seen!r}") == processes


def test_fewer_devices_than_processes_are_refused(tmp_path):
    refused = launch_script(tmp_path / "script.py", 4, "0,1")
    assert refused.returncode == 1
    assert refused.stderr == "error: gpus: 4, but CUDA_VISIBLE_DEVICES lists only 2 (0,1); set gpus: 2\n"


def launch_script(script, processes: int, visible: str | None, folder=None) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = ["bash", PROJECT / "workflow_scripts/launch.sh", str(processes), "1", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: bash workflow_scripts/launch.sh GPUS NODES SCRIPT [ARGUMENT...]\n"),
        (
            ["2", "2", "script.py"],
            "error: nodes: 2 needs Slurm (snakemake --profile profiles/slurm), but this is not a Slurm job\n",
        ),
    ],
    ids=["no arguments", "nodes without Slurm"],
)
def test_the_launcher_refuses_arguments(arguments, message):
    launch = ["bash", PROJECT / "workflow_scripts/launch.sh", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    refused = subprocess.run(launch, env=environment, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (2, message)


def test_gpus_that_nodes_cannot_divide_are_refused(tmp_path):
    printed = copy_project(tmp_path).run("baseline", "--dry-run", config=("gpus=3", "nodes=2"), ok=False)
    assert "gpus: 3 cannot be shared evenly by nodes: 2" in printed
