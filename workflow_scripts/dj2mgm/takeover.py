"""One run of the workflow in a folder at a time, which takes over from a run that was killed there.

A killed Snakemake leaves stages that go on without it on this machine, and jobs on a cluster. Snakemake would start
them once more beside themselves. So each run holds a lock of the kernel's, which ends with its process however that
ends, and notes who it is; the next run ends the stages of a dead one, which nobody waits for any more. Jobs in Slurm
record by themselves that they are done: they are waited for. Snakemake's own lock, which outlives its process, is off
(profiles/default).
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil

from dj2mgm.errors import InputError
from dj2mgm.files import write_json

STATE = Path(".snakemake")
OWNER = STATE / "owner.json"
LOCK = STATE / "owner.lock"
# %i is a job's number, %Z the folder it was submitted from, %k a comment: both cluster profiles have the rule there
# every state of a job that has not ended; by itself squeue leaves out what an administrator suspended
LIST_JOBS = ["squeue", "--me", "--noheader", "--states=PD,CF,R,S,ST,CG,RQ,SI", "--format=%i|%Z|%k"]
COMMENT = "rule_"
POLL_S = 5
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
LOOKS, LOOK_S = 10, 0.1  # whoever looks whether a run is at work holds the lock for a moment

_lock: IO | None = None  # held until this process ends


def start_run(on_cluster: bool) -> bool:
    """This process runs the workflow in the current folder; return when nothing of a killed run is at work any more.

    Returns:
        whether there was something of a killed run. It may have changed results since Snakemake looked at them.

    Raises:
        InputError: another run is at work here, or one on another host did not end properly.
    """
    global _lock
    STATE.mkdir(exist_ok=True)
    file, owner = open(LOCK, "a"), _read_owner()
    for _ in range(LOOKS):
        if _is_free(file, fcntl.LOCK_EX, owner):
            break
        time.sleep(LOOK_S)
    else:
        whose = f" on {owner['host']} (process {owner['pid']})" if owner else ""
        raise InputError(f"another run is in progress in this folder{whose}; wait for it, or stop it first")
    _lock = file
    taken_over = bool(owner) and _take_over(owner)
    _write_owner(on_cluster, ended=False)
    return taken_over


def end_run(on_cluster: bool) -> None:
    """The run ended properly: none of its stages is at work on this machine."""
    _write_owner(on_cluster, ended=True)


def restart_snakemake(on_cluster: bool) -> None:
    """The same command again, in this process: Snakemake then decides by the results as they are now."""
    end_run(on_cluster)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])


def at_work() -> bool:
    """Whether a run is at work in the current folder."""
    if not LOCK.exists():
        return False
    with open(LOCK) as file:
        return not _is_free(file, fcntl.LOCK_SH, _read_owner())


def _is_free(file: IO, kind: int, owner: dict | None) -> bool:
    """Lock the file; return whether no run holds it. Where the file system has no locks, the owner's note tells."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return not (owner and _alive(owner))


def _alive(owner: dict) -> bool:
    """Whether a run on this host that did not end is another living process."""
    if owner.get("ended") or owner["host"] != socket.gethostname() or owner["pid"] == os.getpid():
        return False
    try:
        return psutil.Process(owner["pid"]).create_time() == owner["started"]
    except psutil.NoSuchProcess:
        return False


def _write_owner(on_cluster: bool, ended: bool) -> None:
    process = psutil.Process()
    owner = {
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "process_group": os.getpgrp(),
        "on_cluster": on_cluster,
        "ended": ended,
    }
    write_json(OWNER, owner)


def _take_over(owner: dict) -> bool:
    """Return whether there was something to end or to wait for."""
    killed = not owner.get("ended")
    if killed:
        if owner["host"] != socket.gethostname():
            raise InputError(
                f"the last run in this folder, on {owner['host']}, was killed, and its stages may be at work there; "
                f"end them, delete {OWNER}, and run the same command again"
            )
        _print("the last run in this folder was killed; going on from where it was")
        _end_stages(owner)
    waited = bool(owner.get("on_cluster")) and _wait_for_jobs()
    return killed or waited


def _read_owner() -> dict | None:
    """Who ran the workflow here last; None if nobody did, or if the note is damaged."""
    try:
        owner = json.loads(OWNER.read_text(encoding="utf-8"))
        complete = (
            isinstance(owner["host"], str)
            and type(owner["pid"]) is int
            and owner["pid"] > 0
            and isinstance(owner["started"], float)
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return owner if complete else None


def _end_stages(owner: dict) -> None:
    for process in psutil.process_iter(["cmdline", "cwd"]):
        in_folder = process.info["cwd"] == str(Path.cwd())
        if in_folder and any("workflow_scripts/" in part for part in process.info["cmdline"] or ()):
            try:
                if os.getpgid(process.pid) == owner.get("process_group"):
                    process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass


def _wait_for_jobs() -> bool:
    """Return whether there were any."""
    reported = None
    while jobs := jobs_in(Path.cwd()):
        if jobs != reported:
            reported = jobs
            _print(f"waiting for the jobs of the killed run in Slurm (scancel ends them): {', '.join(jobs)}")
        time.sleep(POLL_S)
    return reported is not None


def jobs_in(folder: Path) -> list[str]:
    """The user's jobs of this folder's workflow that wait or run in Slurm, by number and rule.

    Raises:
        InputError: Slurm does not answer.
    """
    if not shutil.which(LIST_JOBS[0]):
        return []
    listed = subprocess.run(LIST_JOBS, capture_output=True, text=True)
    if listed.returncode:
        raise InputError(
            f"Slurm does not say which jobs a killed run left ({listed.stderr.strip()}); try again when squeue answers"
        )
    # a comment of somebody's may hold anything, a line break too; so may a folder's name, but for that
    jobs = [line.partition("|") for line in listed.stdout.splitlines()]
    ours = f"{folder}|"
    rules = [(job, rest.removeprefix(ours)) for job, _, rest in jobs if rest.startswith(f"{ours}{COMMENT}")]
    return [f"{job} ({rule})" for job, rule in rules]


def _print(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
