"""Freeing a folder that a killed Snakemake left locked, so that the same command simply goes on.

Snakemake's lock does not say whose it is, so each run notes its host and process beside it. A lock is removed only if
the run that is noted there was on this host and is dead.
"""

import json
import shutil
import socket
from pathlib import Path

import psutil

STATE = Path(".snakemake")
OWNER = STATE / "owner.json"
LOCKS = STATE / "locks"


def note_owner() -> None:
    """This process runs the workflow in the current folder."""
    process = psutil.Process()
    owner = {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}
    OWNER.write_text(json.dumps(owner), encoding="utf-8")


def remove_stale_lock() -> bool:
    """Remove the lock of a run that was killed on this host; return whether there was one."""
    if not _locked() or not OWNER.is_file() or at_work():
        return False
    shutil.rmtree(LOCKS)
    return True


def at_work() -> bool:
    """Whether a run is at work in the current folder; of one on another host only the lock can be seen."""
    if not OWNER.is_file():
        return False
    owner = json.loads(OWNER.read_text(encoding="utf-8"))
    return _alive(owner) if owner["host"] == socket.gethostname() else _locked()


def _locked() -> bool:
    return any(LOCKS.glob("*.lock"))


def _alive(owner: dict) -> bool:
    try:
        return psutil.Process(owner["pid"]).create_time() == owner["started"]
    except psutil.NoSuchProcess:
        return False
