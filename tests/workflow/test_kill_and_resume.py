"""After a SIGKILL in the middle of a stage, the same command completes, and training resumes at its checkpoint.

These tests run last on the finished run (tests/conftest.py), because they remove its later stages.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from dj2mgm.monitoring.memory_files import read_memory_rows
from dj2mgm.storage.files import read_json, read_jsonl
from dj2mgm.torch_environment import locate_extensions
from killed_runs import TIMEOUT_S, kill_midway

# A constant added to every key cancels in the softmax over sub-patches. These biases have only rounding errors as
# gradients, which Adam scales to full steps, and do not change the model's results.
CANCELLED = {"patch_info_mining.key.0.bias", "patch_info_mining.key.1.bias"}


def make_running_check(script: str, folder, seconds: float) -> Callable[[], bool]:
    """Return a function that checks whether a process has been running `script` in this project for some seconds."""

    def check() -> bool:
        for process in psutil.process_iter(["cmdline", "cwd", "create_time"]):
            info = process.info
            if info["cwd"] == str(folder) and script in " ".join((info["cmdline"] or [])[1:2]):
                if time.time() - info["create_time"] > seconds:
                    return True
        return False

    return check


def find_training_processes(folder) -> list[psutil.Process]:
    processes = [process for process in psutil.process_iter(["cmdline", "cwd"]) if process.info["cwd"] == str(folder)]
    return [process for process in processes if "workflow_scripts/pretrain.py" in (process.info["cmdline"] or [])]


def leave_build_lock() -> None:
    """Leave a build lock, like a process that is killed while it loads DeepSpeed's optimizer."""
    folders = list(locate_extensions().glob("cpu_adam"))
    assert folders
    for folder in folders:
        (folder / "lock").touch()


def check_steps_and_memory(folder: Path) -> None:
    """Check that each step of a resumed training has one row, and that the memory of both attempts was measured."""
    steps = [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]
    assert steps == sorted(set(steps)) and len(steps) == read_json(folder / "metrics.json")["steps"]
    assert {row["attempt"] for row in read_memory_rows(folder / "memory.csv")} == {"1", "2"}


STAGES = ("filter", "jsonl", "pretrain", "finetune", "generate", "evaluate_clip", "evaluate_vqa", "report")


def undo(project, first: str) -> None:
    """Restore the project's state before the stage `first`."""
    for stage in STAGES[STAGES.index(first) :]:
        shutil.rmtree(project.result(stage), ignore_errors=True)


EITHER = [pytest.param(False, id="the stage", marks=pytest.mark.slow), pytest.param(True, id="snakemake too")]


@pytest.mark.slow
@pytest.mark.parametrize("whole_tree", EITHER)
def test_killed_foundation_completes_on_the_same_command(fresh, finished, whole_tree):
    weights = "results/foundation/small/clip/model.safetensors"
    command = ("baseline", "--until", "train_clip")
    is_running = make_running_check("train_clip.py", fresh.folder, 3)
    kill_midway(fresh, is_running, *command, whole_tree=whole_tree, forked=False)
    assert not (fresh.folder / weights).exists()
    fresh.run(*command)
    uninterrupted, resumed = load_file(finished.folder / weights), load_file(fresh.folder / weights)
    assert all((uninterrupted[name] - resumed[name]).abs().max() < 1e-3 for name in uninterrupted)


@pytest.mark.slow  # a unit test kills only the stage
@pytest.mark.parametrize("whole_tree", EITHER)
def test_killed_filter_completes_with_the_same_rows(finished, whole_tree):
    folder, command = finished.result("filter"), ("baseline", "--until", "filter_data")
    uninterrupted = {name: (folder / name).read_bytes() for name in ("filtered.jsonl", "dropped.jsonl")}
    undo(finished, "filter")
    kill_midway(finished, lambda: any(folder.glob(".*/pass-0")), *command, whole_tree=whole_tree)
    assert not (folder / "summary.json").exists()
    finished.run(*command)
    assert {name: (folder / name).read_bytes() for name in uninterrupted} == uninterrupted
    assert not list(folder.glob(".*")), "a file of the killed run remains"


@pytest.mark.slow
@pytest.mark.parametrize("whole_tree", [False, True], ids=["the stage", "snakemake too"])
def test_killed_captioning_captions_no_image_twice(synthesized, whole_tree):
    folder, captions = synthesized.result("synthesize", "dj_synth"), synthesized.folder / "results/captions"
    command = ("results/small/small/dj_synth/synthesize/summary.json",)
    synthesized.run(*command)
    uninterrupted = {name: (folder / name).read_bytes() for name in ("synthesized.jsonl", "dropped.jsonl")}
    shutil.rmtree(folder)
    shutil.rmtree(captions)

    def count_captions() -> int:
        return sum(path.read_bytes().count(b"\n") for path in captions.glob("*/*.jsonl"))

    kill_midway(synthesized, lambda: count_captions() > 0, *command, whole_tree=whole_tree)
    assert not (folder / "summary.json").exists()
    captions_before = count_captions()
    synthesized.run(*command)
    counts = read_json(folder / "summary.json")["operators"][0]["recaption"]
    assert counts["cached"] >= captions_before > 0 and counts["captioned"] + counts["cached"] == counts["below"]
    assert {name: (folder / name).read_bytes() for name in uninterrupted} == uninterrupted


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stage_that_outlives_snakemake_ends_before_a_rerun(finished, forked):
    folder, command = finished.result("pretrain"), ("baseline", "--until", "pretrain")
    undo(finished, "pretrain")

    def saved() -> bool:
        return any(folder.glob("checkpoints/*/complete.json"))

    kill_midway(finished, saved, *command, snakemake_alone=True, forked=forked)
    orphans = find_training_processes(finished.folder)
    assert orphans
    leave_build_lock()
    assert "resuming from step" in finished.run(*command)
    assert not any(process.is_running() for process in orphans)
    check_steps_and_memory(folder)


@pytest.mark.slow  # the test above ends the stage instead of waiting for it
def test_a_stage_that_ended_without_snakemake_is_not_retrained(finished):
    folder, command = finished.result("pretrain"), ("baseline", "--until", "pretrain")
    undo(finished, "pretrain")
    kill_midway(finished, lambda: any(folder.glob("checkpoints/*/complete.json")), *command, snakemake_alone=True)
    psutil.wait_procs(find_training_processes(finished.folder), TIMEOUT_S)
    before = {name: (folder / name).read_bytes() for name in ("projector.safetensors", "metrics.jsonl")}
    printed = finished.run(*command)
    metrics = read_json(folder / "metrics.json")
    log = (folder / "pretrain.log").read_text(encoding="utf-8")
    assert f"resuming from step {metrics['steps']}" in printed and " steps, loss" not in log
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert metrics["engine"]["zero_stage"] == 2
    assert not (folder / "checkpoints").exists(), "kept although Snakemake has recorded the stage"


@pytest.mark.slow  # unit tests compare the weights of trainings that were killed in each DeepSpeed configuration
@pytest.mark.parametrize("whole_tree", [True, False])
@pytest.mark.parametrize(
    ("stage", "weights"), [("pretrain", "projector.safetensors"), ("finetune", "adapter/adapter_model.safetensors")]
)
def test_killed_training_resumes_and_ends_with_the_same_weights(finished, stage, weights, whole_tree):
    folder, command = finished.result(stage), ("baseline", "--until", stage)
    finished.run(*command)
    uninterrupted = load_file(folder / weights)
    undo(finished, stage)
    kill_midway(finished, lambda: any(folder.glob("checkpoints/*/complete.json")), *command, whole_tree=whole_tree)
    assert not (folder / weights).exists()
    leave_build_lock()
    assert "resuming from step" in finished.run(*command)
    resumed = load_file(folder / weights)
    assert resumed.keys() == uninterrupted.keys()
    names = resumed.keys() - CANCELLED
    assert all((resumed[name] - uninterrupted[name]).abs().max() < 1e-4 for name in names)
    check_steps_and_memory(folder)
