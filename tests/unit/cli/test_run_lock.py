"""Takeover from a killed Snakemake; tests/workflow tests the following commands."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from dj2mgm.cli import run_lock
from dj2mgm.cli.run_lock import (
    LOCK_FILE,
    OWNER_FILE,
    SIDE_LOCK_FILE,
    check_scheduler,
    end_run,
    is_run_in_progress,
    list_jobs,
    start_run,
)
from dj2mgm.errors import InputError
from paths import PROJECT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    _let_go()


def _let_go() -> None:
    """Release the lock like the end of the process."""
    if run_lock._lock:
        run_lock._lock.close()


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Put a stand-in for `squeue` on the PATH."""

    def write(script: str) -> None:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return write


def test_jobs_of_other_folders_and_programs_are_left_alone(squeue, tmp_path):
    ours = f"17|{tmp_path}|rule_pretrain_wildcards_a"
    squeue(f"printf '%s\\n' '{ours}' '18|{tmp_path}|note | mine' 'second line' '19|/else|rule_x' '20|{tmp_path}|'")
    assert list_jobs(tmp_path) == ["17 (rule_pretrain_wildcards_a)"]
    squeue(f"printf '%s\\n' '17|{tmp_path}/a|b|rule_pretrain'")
    assert list_jobs(tmp_path / "a|b") == ["17 (rule_pretrain)"]


def test_unreachable_slurm_is_reported_in_one_sentence(squeue, tmp_path):
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(InputError, match="Unable to contact.*Try again when it answers"):
        list_jobs(tmp_path)


@pytest.mark.parametrize("note", ["", "null", "[]", "{}", '{"host": ', "\udcff"])
def test_an_invalid_owner_file_is_ignored(folder, note):
    OWNER_FILE.parent.mkdir()
    OWNER_FILE.write_bytes(note.encode("utf-8", "surrogateescape"))
    assert not is_run_in_progress()
    start_run(on_cluster=False)
    assert is_run_in_progress() and json.loads(OWNER_FILE.read_text())["pid"] == os.getpid()


RUN = """
import sys
from dj2mgm.cli.run_lock import start_run
start_run(False, ["results/b"], ["results/a", "results/b"])
print("running", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(folder):
    """Start a run in another process."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "workflow_scripts")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RUN], env=environment, **pipes) as process:
        assert process.stdout.readline() == b"running\n"
        yield process
        process.kill()


def test_two_runs_in_one_folder_exclude_each_other(other_run, monkeypatch):
    monkeypatch.setattr("dj2mgm.cli.run_lock.ATTEMPTS", 1)
    assert is_run_in_progress()
    with pytest.raises(
        InputError, match=rf"in progress in this folder on .* \(process {other_run.pid}\); wait for it.* \(-n\)"
    ):
        start_run(on_cluster=False)


def test_a_short_command_runs_beside_a_run_that_uses_other_files(other_run, monkeypatch):
    monkeypatch.setattr("dj2mgm.cli.run_lock.ATTEMPTS", 1)
    note = OWNER_FILE.read_text()
    assert not start_run(False, ["results/c"], is_short=True)
    assert not run_lock.is_locked_here() and OWNER_FILE.read_text() == note
    beside = run_lock._lock
    with pytest.raises(InputError, match="another command starts"):
        start_run(False, ["results/d"], is_short=True)
    other_run.kill()
    other_run.wait()
    with pytest.raises(InputError, match="another command starts"):
        start_run(False)
    end_run(False)
    assert not run_lock.SIDE_NOTE_FILE.exists()
    beside.close()


@pytest.mark.parametrize("file", ["results/a", "results/b"], ids=["read", "made"])
def test_a_short_command_waits_for_a_run_that_uses_its_files(other_run, monkeypatch, file):
    monkeypatch.setattr("dj2mgm.cli.run_lock.ATTEMPTS", 1)
    with pytest.raises(InputError, match=f"uses {file}, which this command makes"):
        start_run(False, [file, "results/c"], is_short=True)


def test_stages_of_a_killed_short_command_are_ended(folder, monkeypatch):
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "workflow_scripts")}
    stage = [sys.executable, "-c", "import time; time.sleep(60)", "workflow_scripts/make_dataset.py"]
    with subprocess.Popen(stage, env=environment, start_new_session=True) as process:
        OWNER_FILE.parent.mkdir(exist_ok=True)
        note = run_lock._describe_process() | {"process_group": process.pid}
        run_lock.SIDE_NOTE_FILE.write_text(json.dumps(note))
        start_run(False)
        assert process.wait(10) == -signal.SIGKILL and not run_lock.SIDE_NOTE_FILE.exists()


def test_a_killed_run_that_nobody_waits_for_blocks_no_other(other_run, capsys):
    os.kill(other_run.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other_run.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert not is_run_in_progress()
    assert start_run(on_cluster=False)
    assert "the last run in this folder was killed" in capsys.readouterr().err


def test_takeover_of_a_killed_run_ends_its_stages(other_run, folder, capsys):
    (folder / "workflow_scripts").mkdir()
    (folder / "workflow_scripts/stage.py").write_text("import time; time.sleep(60)")
    note = json.loads(OWNER_FILE.read_text())
    group = {"process_group": note["process_group"]}
    with subprocess.Popen([sys.executable, "workflow_scripts/stage.py"], **group) as stage:
        other_run.kill()
        other_run.wait()
        assert not is_run_in_progress()
        start_run(on_cluster=False)
        assert stage.wait(10) == -9
    assert "was killed; continuing" in capsys.readouterr().err


def test_a_finished_run_is_not_taken_over(folder, capsys):
    start_run(on_cluster=False)
    end_run(on_cluster=False)
    _let_go()
    start_run(on_cluster=False)
    assert capsys.readouterr().err == ""


def test_run_killed_on_another_host_is_not_taken_over(folder):
    OWNER_FILE.parent.mkdir()
    OWNER_FILE.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 1.0}))
    with pytest.raises(InputError, match="on elsewhere, was killed.*delete .snakemake/owner.json"):
        start_run(on_cluster=False)


def test_owner_file_suffices_without_file_system_locks(other_run, monkeypatch):
    def unsupported(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    monkeypatch.setattr("dj2mgm.cli.run_lock.ATTEMPTS", 1)
    assert is_run_in_progress()
    with pytest.raises(InputError, match="another run is in progress"):
        start_run(on_cluster=False)
    run_lock.SIDE_NOTE_FILE.write_text(OWNER_FILE.read_text())  # the other process is a short command, too
    with pytest.raises(InputError, match="another command starts"):
        start_run(False, ["results/c"], is_short=True)
    other_run.kill()
    other_run.wait()
    assert start_run(on_cluster=False), "something was taken over"


def test_the_owner_file_is_written_atomically(folder, monkeypatch):
    start_run(on_cluster=False)
    assert sorted(path.name for path in OWNER_FILE.parent.iterdir()) == sorted(
        [OWNER_FILE.name, LOCK_FILE.name, SIDE_LOCK_FILE.name]
    )
    monkeypatch.setattr("json.dump", lambda *arguments, **options: arguments[1].write("{") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        end_run(on_cluster=False)
    assert not json.loads(OWNER_FILE.read_text())["ended"], "the note that was there"


def test_a_missing_scheduler_ends_the_run_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_scheduler("local")
    with pytest.raises(InputError, match="sbatch is missing on this machine"):
        check_scheduler("slurm")
