"""Kill -9 in the middle of a stage, then the same command: it completes, and training resumes where it was."""

import shutil
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from safetensors.torch import load_file

TIMEOUT_S = 120


def kill_midway(project, until: Callable[[], bool], *arguments: str, whole_tree: bool) -> None:
    """Start Snakemake, wait until the stage is at work, and kill -9 it (with or without Snakemake itself)."""
    with open(project.folder / "killed.log", "w") as log:
        process = subprocess.Popen(
            project.command(*arguments), cwd=project.folder, env=project.environment(), stdout=log, stderr=log
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert process.poll() is None, (project.folder / "killed.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the stage never came to where it was to be killed"
            time.sleep(0.02)
        tree = psutil.Process(process.pid).children(recursive=True)
        if whole_tree:
            tree.append(psutil.Process(process.pid))
        for victim in tree:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                pass
        assert process.wait(TIMEOUT_S) != 0


def running_for(script: str, folder, seconds: float) -> Callable[[], bool]:
    """Whether a process that runs `script` in this project has been at work for some time."""

    def check() -> bool:
        for process in psutil.process_iter(["cmdline", "cwd", "create_time"]):
            info = process.info
            if info["cwd"] == str(folder) and script in " ".join((info["cmdline"] or [])[1:2]):
                if time.time() - info["create_time"] > seconds:
                    return True
        return False

    return check


@pytest.mark.parametrize("whole_tree", [False, True], ids=["the stage", "snakemake too"])
def test_foundation_killed_midway_completes_on_the_same_command(finished, whole_tree):
    wanted = finished.folder / "results/foundation/small/clip/model.safetensors"
    before = load_file(wanted)
    arguments = ("--forcerun", "train_clip", "--until", "train_clip")
    kill_midway(
        finished, running_for("train_clip.py", finished.folder, 3), "baseline", *arguments, whole_tree=whole_tree
    )
    assert not wanted.exists()
    finished.run("baseline")
    after = load_file(wanted)
    assert all((before[name] - after[name]).abs().max() < 1e-3 for name in before)
    assert finished.jobs() == set()


def test_filter_killed_midway_completes_on_the_same_command_with_the_same_rows(finished):
    wanted = finished.result("filter") / "filtered.jsonl"
    before = wanted.read_bytes()
    log = finished.result("filter") / "filter_data.log"
    arguments = ("--forcerun", "filter_data", "--until", "filter_data")
    log.unlink()
    kill_midway(
        finished, lambda: log.exists() and "[2/" in log.read_text(), "baseline", *arguments, whole_tree=False
    )
    assert not wanted.exists()
    finished.run("baseline")
    assert wanted.read_bytes() == before
    assert not list(finished.result("filter").glob(".*"))


@pytest.mark.parametrize("whole_tree", [False, True], ids=["the stage", "snakemake too"])
@pytest.mark.parametrize(
    ("stage", "weights"),
    [("pretrain", "projector.safetensors"), ("finetune", "adapter/adapter_model.safetensors")],
)
def test_training_killed_midway_resumes_and_ends_with_the_same_weights(finished, stage, weights, whole_tree):
    folder = finished.result(stage)
    uninterrupted = load_file(folder / weights)
    arguments = ("baseline", "--forcerun", stage, "--until", stage)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    kill_midway(
        finished, lambda: any(folder.glob("checkpoints/*/complete.json")), *arguments, whole_tree=whole_tree
    )
    assert not (folder / weights).exists()
    printed = finished.run("baseline")
    assert "resuming from step" in printed
    resumed = load_file(folder / weights)
    assert resumed.keys() == uninterrupted.keys()
    assert all((resumed[name] - uninterrupted[name]).abs().max() < 1e-4 for name in resumed)
    assert finished.jobs() == set()
