"""What a killed Snakemake leaves behind, so that the same command simply goes on.

Snakemake's lock does not say whose it is, and jobs that it submitted to a cluster outlive it. So each run notes its
host and process, and whether its jobs went to a cluster. A lock is removed only if the run that is noted was on this
host and is dead. Jobs that are still in Slurm are waited for, because Snakemake would start them once more beside
themselves.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

STATE = Path(".snakemake")
OWNER = STATE / "owner.json"
LOCKS = STATE / "locks"
# both cluster profiles put the rule's name here; %Z is the folder of the project, %i the job's number
LIST_JOBS = ["squeue", "--me", "--noheader", "--format=%i|%Z|%k"]
COMMENT = "rule_"
POLL_S = 5


def note_owner(on_cluster: bool) -> None:
    """This process runs the workflow in the current folder."""
    process = psutil.Process()
    owner = {
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "on_cluster": on_cluster,
    }
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
    owner = _owner()
    return _alive(owner) if owner["host"] == socket.gethostname() else _locked()


def wait_for_jobs() -> None:
    """Return when no job of an earlier run is left in Slurm; at once where a run holds the lock: Snakemake says so."""
    if _locked() or not OWNER.is_file() or not _owner().get("on_cluster"):
        return
    said = None
    while left := _jobs_in(Path.cwd()):
        if left != said:
            print(
                f"waiting for jobs of the run that was killed: {', '.join(left)}; `scancel` ends them", file=sys.stderr
            )
            said = left
        time.sleep(POLL_S)


def _jobs_in(folder: Path) -> list[str]:
    """The user's jobs of this folder's workflow that wait or run in Slurm, by number and rule."""
    if not shutil.which(LIST_JOBS[0]):
        return []
    lines = subprocess.run(LIST_JOBS, capture_output=True, text=True, check=True).stdout.splitlines()
    jobs = [line.split("|") for line in lines]
    return [f"{job} ({rule})" for job, home, rule in jobs if Path(home) == folder and rule.startswith(COMMENT)]


def _locked() -> bool:
    return any(LOCKS.glob("*.lock"))


def _owner() -> dict:
    return json.loads(OWNER.read_text(encoding="utf-8"))


def _alive(owner: dict) -> bool:
    try:
        return psutil.Process(owner["pid"]).create_time() == owner["started"]
    except psutil.NoSuchProcess:
        return False
