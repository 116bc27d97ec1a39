"""Locks in PyTorch's build folders are removed if their owner is dead, and kept during a build."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dj2mgm.torch_environment import locate_extensions
from dj2mgm.training import build_locks
from dj2mgm.training.build_locks import MAX_BUILD_S, find_stale_locks, guard_wait_for_locks, remove_stale_locks

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
    return locate_extensions()


def make_abandoned_lock(root: Path, name: str = "cpu_adam") -> Path:
    lock = root / name / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_lock_is_removed_once_its_owner_is_dead(root, monkeypatch):
    monkeypatch.setattr(build_locks, "CHECK_S", 0.01)
    folder = root / "cpu_adam"
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, folder / "lock"], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        with guard_wait_for_locks():
            time.sleep(0.1)
        assert (folder / "lock").exists()
        owner.send_signal(signal.SIGKILL)
    assert (folder / "lock").exists(), "a killed process leaves its lock: this is what is repaired"
    with guard_wait_for_locks():
        while (folder / "lock").exists():  # as PyTorch waits
            time.sleep(0.01)


def test_the_own_lock_is_not_stale(root):
    earlier = open(__file__)
    lock = make_abandoned_lock(root)
    with open(lock):
        earlier.close()  # a lower number of a file is free again
        assert find_stale_locks() == []


def test_only_locks_are_removed(root):
    locks = {make_abandoned_lock(root), make_abandoned_lock(root, "deepspeed_shm_comm")}
    (root / "cpu_adam/cpu_adam.so").touch()
    assert set(find_stale_locks()) == locks
    remove_stale_locks()
    assert [path for path in root.rglob("*") if path.is_file()] == [root / "cpu_adam/cpu_adam.so"]


def test_only_the_age_makes_a_shared_lock_stale(root, monkeypatch):
    lock = make_abandoned_lock(root)
    mount = type("Mount", (), {"mountpoint": str(root), "fstype": "nfs4"})
    monkeypatch.setattr(build_locks.psutil, "disk_partitions", lambda all: [mount])
    assert find_stale_locks() == []
    os.utime(lock, (time.time() - MAX_BUILD_S - 60,) * 2)
    assert find_stale_locks() == [lock]


def test_a_missing_build_folder_is_accepted(root):
    assert not root.exists() and find_stale_locks() == []
