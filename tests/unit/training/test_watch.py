"""The live view of results of running, killed and finished stages."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from dj2mgm.monitoring.memory_files import read_last_row, read_memory_rows
from dj2mgm.storage.files import write_json, write_text
from paths import PROJECT
from watch import find_runs, read_stage_states

PROGRESS = {"step": 30, "max_steps": 150, "loss": 2.5, "learning_rate": 1e-3, "seconds": 60.0, "seconds_left": 3725.0}
MEMORY = "attempt,time,seconds,phase,job_gib,host_gib,cgroup_gib,gpu0_gib\n1,now,1.0,loading,1.0,3.0,,0.5\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Make results of the baseline in stage 1, and of dj_synth with captions and a shared filter."""
    for stage, name in (("filter", "summary.json"), ("jsonl", "summary.json")):
        write_text(tmp_path / f"results/shapes/tiny/baseline/{stage}/{name}", "{}")
    folder = tmp_path / "results/shapes/tiny/baseline/pretrain"
    write_text(folder / "pretrain.log", "")
    write_text(folder / "config.log", "")
    write_json(folder / "progress.json", PROGRESS)
    write_text(folder / "checkpoints/memory.csv", MEMORY + "1,now,2.0,training,1.5,3.5,,20.25\n1,now,3.0,tra")
    write_text(tmp_path / "results/shapes/tiny/baseline/finetune/config.log", "")
    write_text(tmp_path / "results/shapes/tiny/dj_synth/seed-1/synthesize/summary.json", "{}")
    write_text(tmp_path / "results/datasets/shapes/images/pretrain/0.png", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def is_running(project):
    """Hold the lock of a run, like a running Snakemake."""
    (project / ".snakemake").mkdir()
    with open(project / ".snakemake/owner.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def states(project, run: str, working: bool) -> dict[str, str]:
    return {stage.name: stage.state for stage in read_stage_states(project / "results/shapes/tiny" / run, working)}


def watch(project, *arguments: str) -> str:
    command = [sys.executable, str(PROJECT / "workflow_scripts/watch.py"), *arguments]
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_runs_are_the_folders_with_stages(project):
    folders = find_runs(project / "results")
    names = [str(folder.relative_to(project / "results/shapes/tiny")) for folder in folders]
    assert names == ["baseline", "dj_synth/seed-1"]


def test_stages_are_done_running_or_pending(project):
    expected = {"filter": "done", "synthesize": "", "jsonl": "done", "pretrain": "running", "finetune": "pending"}
    stage_states = states(project, "baseline", working=True)
    assert expected.items() <= stage_states.items() and stage_states["evaluate_vqa"] == "pending"
    assert states(project, "baseline", working=False)["pretrain"] == "stopped"


def test_stages_done_by_another_run_are_not_pending(project):
    stage_states = states(project, "dj_synth/seed-1", working=True)
    assert (stage_states["filter"], stage_states["synthesize"], stage_states["jsonl"]) == ("", "done", "pending")


def test_an_optional_stage_without_a_folder_is_no_part_of_the_run(project):
    shutil.rmtree(project / "results/shapes/tiny/baseline/jsonl")
    shutil.rmtree(project / "results/shapes/tiny/baseline/pretrain")
    stage_states = states(project, "baseline", working=True)
    assert (stage_states["synthesize"], stage_states["jsonl"], stage_states["pretrain"]) == ("", "pending", "")


def test_a_shared_stage_is_not_pending(project):
    write_text(project / "results/shapes/tiny/baseline/generate/stage.yaml", "same_as: results/other/generate")
    assert states(project, "baseline", working=True)["generate"] == ""


def test_the_view_shows_step_loss_time_left_and_memory(project):
    with is_running(project):
        printed = re.sub(r"[│\s]+", " ", watch(project))
    assert "baseline pretrain 30 of 150 2.5000 1 h 02 min training host 1.5, gpu0 20.25" in printed
    assert "pretrain running" in printed and "snakemake is running" in printed
    printed = watch(project, "--once")
    assert "stopped" in printed and "snakemake is not running" in printed


def test_another_folder_is_refused_with_a_remedy(tmp_path):
    assert (
        watch(tmp_path) == "error: the folder results/ is missing; start watch.py in the folder where snakemake runs\n"
    )


def test_only_the_newest_complete_row_is_read(tmp_path):
    file = tmp_path / "memory.csv"
    header, first = MEMORY.splitlines(keepends=True)
    file.write_text(header)
    assert read_last_row(file) is None
    for rows in (1, 2, 5000):
        many = "".join(first.replace("now", f"t{row}") for row in range(rows))
        file.write_text(header + many + "1,cut o")
        assert read_last_row(file) == read_memory_rows(file)[-1]
        assert json.dumps(read_last_row(file)).count(f"t{rows - 1}") == 1
