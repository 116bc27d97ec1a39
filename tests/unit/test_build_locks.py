"""Locks in PyTorch's build folders: removed when their owner is dead, left alone while somebody builds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dj2mgm.training import build_locks
from dj2mgm.training.build_locks import LONGEST_BUILD_S, remove_stale_locks, stale_locks

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def abandoned(root: Path, name: str = "py311_cpu/cpu_adam") -> Path:
    lock = root / name / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_lock_of_pytorchs_own_kind_stays_while_its_owner_lives_and_goes_when_it_was_killed(root):
    folder = root / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, folder / "lock"], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        remove_stale_locks()
        assert (folder / "lock").exists()
        owner.send_signal(signal.SIGKILL)
    assert (folder / "lock").exists(), "a killed process leaves its lock: this is what is repaired"
    remove_stale_locks()
    assert not (folder / "lock").exists()


def test_locks_are_found_with_and_without_a_folder_for_the_python_version_and_nothing_else_is_touched(root):
    locks = {abandoned(root), abandoned(root, "deepspeed_shm_comm")}
    (root / "py311_cpu/cpu_adam/cpu_adam.so").touch()
    assert set(stale_locks()) == locks
    remove_stale_locks()
    assert [path for path in root.rglob("*") if path.is_file()] == [root / "py311_cpu/cpu_adam/cpu_adam.so"]


def test_on_a_shared_file_system_only_a_lock_older_than_any_build_is_stale(root, monkeypatch):
    lock = abandoned(root)
    mount = type("Mount", (), {"mountpoint": str(root), "fstype": "nfs4"})
    monkeypatch.setattr(build_locks.psutil, "disk_partitions", lambda all: [mount])
    assert stale_locks() == []
    os.utime(lock, (time.time() - LONGEST_BUILD_S - 60,) * 2)
    assert stale_locks() == [lock]


def test_without_a_build_folder_there_is_nothing_to_remove(root):
    assert stale_locks(root / "never built") == []
