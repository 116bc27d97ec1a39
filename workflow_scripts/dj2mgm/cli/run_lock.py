"""Lock that allows one run of the workflow per folder, and takeover from a killed run.

A killed Snakemake leaves stages running on this machine, and jobs on a cluster. A new Snakemake would start the same
stages again while the old ones are still running. So each run holds a kernel lock, which ends with its process, and
writes a note about itself. The next run ends the local stages of a killed run. It waits for jobs in Slurm, which record
their completion themselves. Snakemake's own lock, which outlives its process, is off (profiles/default).

A run also notes the files that it reads or makes. A short command, such as `check`, runs beside it if it makes none of
them. It holds a second lock and has a note of its own, so that the next command ends its stages if it is killed.
"""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

import psutil

from dj2mgm.cli.command_line import restart_process
from dj2mgm.errors import InputError
from dj2mgm.storage.files import read_if_whole, write_json

SNAKEMAKE_FOLDER = Path(".snakemake")
OWNER_FILE = SNAKEMAKE_FOLDER / "owner.json"
LOCK_FILE = SNAKEMAKE_FOLDER / "owner.lock"
# of a short command beside a run; a run holds the lock, too, until its note is written
SIDE_LOCK_FILE, SIDE_NOTE_FILE = SNAKEMAKE_FOLDER / "side.lock", SNAKEMAKE_FOLDER / "side.json"
# %i is a job's number, %Z the folder it was submitted from, %k a comment, in which both cluster profiles put the rule.
# The states are all states before a job's end; by default, squeue leaves out jobs that an administrator suspended.
LIST_JOBS = ["squeue", "--me", "--noheader", "--states=PD,CF,R,S,ST,CG,RQ,SI", "--format=%i|%Z|%k"]
COMMENT_PREFIX = "rule_"
POLL_S = 5
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
ATTEMPTS, ATTEMPT_S = 10, 0.1  # a process that checks for a run holds the lock for a moment

_lock: IO | None = None  # held until this process ends


def start_run(
    on_cluster: bool, made_files: Collection[str] = (), used_files: Collection[str] = (), is_short: bool = False
) -> bool:
    """Lock the current folder for this process, and wait until no stage of a killed run is running.

    Args:
        on_cluster: whether jobs run on a cluster.
        made_files: files that this command makes.
        used_files: files that this command reads or makes, also those that are made already.
        is_short: whether this command may run beside a run that uses none of the files that it makes.

    Returns:
        Whether stages of a killed run were found. They may have changed results since Snakemake read them.
    """
    global _lock
    SNAKEMAKE_FOLDER.mkdir(exist_ok=True)
    file, side, owner = open(LOCK_FILE, "a"), open(SIDE_LOCK_FILE, "a"), _read_owner()
    if _acquire(file, owner):
        _acquire_side(side)
        _lock = file
        taken_over = bool(owner) and _take_over(owner)
        _write_owner(on_cluster, ended=False, used_files=used_files)
        side.close()
        return taken_over
    reason = ""
    if is_short:
        _acquire_side(side)
        owner = _read_owner()  # the run has written its note before it released the second lock
        common = sorted({*made_files} & {*(owner or {}).get("used_files", ())})
        if owner and not common:
            write_json(SIDE_NOTE_FILE, _describe_process())
            _lock = side
            return False
        reason = f", and uses {common[0]}, which this command makes" if common else ""
    owner_note = f" on {owner['host']} (process {owner['pid']})" if owner else ""
    raise InputError(
        f"another run is in progress in this folder{owner_note}{reason}; wait for it, stop it first, or use another "
        "clone. Meanwhile, dry runs (-n) and `python workflow_scripts/watch.py` work, and check and plan with data and "
        "models that it does not use"
    )


def _acquire_side(side: IO) -> None:
    """Lock the file of short commands, and end the stages of a killed one."""
    if not _acquire(side, read_if_whole(SIDE_NOTE_FILE)):
        raise InputError("another command starts or reads data in this folder; run the same command again when it ends")
    if note := read_if_whole(SIDE_NOTE_FILE):
        if note["host"] == socket.gethostname():
            _end_stages(note)
        SIDE_NOTE_FILE.unlink()


def is_locked_here() -> bool:
    """Return whether this process holds the lock of a run; a command that only reads, or runs beside one, does not."""
    return _lock is not None and _lock.name == str(LOCK_FILE)


def check_scheduler(executor: str) -> None:
    """Check that this machine can submit jobs with an executor of Snakemake.

    Raises:
        InputError: it needs Slurm, which is not here. Otherwise each attempt of each job would fail on its own.
    """
    if executor == "slurm" and not shutil.which("sbatch"):
        raise InputError(
            "sbatch is missing on this machine, but the profile submits jobs to Slurm. Run the command on a login node "
            "of the cluster, or without --profile to run the jobs here"
        )


def end_run(on_cluster: bool) -> None:
    """Record that the command has ended and none of its stages is running on this machine."""
    if is_locked_here():
        _write_owner(on_cluster, ended=True)
    elif _lock:
        SIDE_NOTE_FILE.unlink()


def restart_snakemake(on_cluster: bool) -> None:
    """Run the same command again in this process, so that Snakemake reads the current results."""
    end_run(on_cluster)
    restart_process()


def is_run_in_progress() -> bool:
    """Return whether a run is in progress in the current folder."""
    if not LOCK_FILE.exists():
        return False
    with open(LOCK_FILE) as file:
        return not _is_free(file, fcntl.LOCK_SH, _read_owner())


def _acquire(file: IO, owner: dict | None) -> bool:
    """Lock the file and return whether that was possible, after some attempts."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(ATTEMPT_S)
        if _is_free(file, fcntl.LOCK_EX, owner):
            return True
    return False


def _is_free(file: IO, kind: int, owner: dict | None) -> bool:
    """Lock the file and return whether no run holds it; the owner's note decides if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return not (owner and _is_alive(owner))


def _is_alive(owner: dict) -> bool:
    """Return whether the owner is another, still living process on this host.

    A killed process that its parent has not waited for, a zombie, is listed but does not live.
    """
    if owner.get("ended") or owner["host"] != socket.gethostname() or owner["pid"] == os.getpid():
        return False
    try:
        process = psutil.Process(owner["pid"])
        return process.create_time() == owner["started"] and process.status() not in DEAD
    except psutil.NoSuchProcess:
        return False


def _describe_process() -> dict:
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "process_group": os.getpgrp(),
    }


def _write_owner(on_cluster: bool, ended: bool, used_files: Collection[str] = ()) -> None:
    owner = {"on_cluster": on_cluster, "ended": ended, "used_files": sorted(used_files)}
    write_json(OWNER_FILE, _describe_process() | owner)


def _take_over(owner: dict) -> bool:
    """End the stages of a killed run and wait for its jobs; return whether it was killed or had jobs."""
    killed = not owner.get("ended")
    if killed:
        if owner["host"] != socket.gethostname():
            raise InputError(
                f"the last run in this folder, on {owner['host']}, was killed, and its stages may still be running "
                f"there; end them, delete {OWNER_FILE}, and run the same command again"
            )
        _print("the last run in this folder was killed; continuing from its last results")
        _end_stages(owner)
    waited = bool(owner.get("on_cluster")) and _wait_for_jobs()
    return killed or waited


def _read_owner() -> dict | None:
    """Return the note of the last run in this folder; None if there is none or it is damaged."""
    return read_if_whole(OWNER_FILE) or None


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
    """Wait until no job of this folder is left in Slurm; return whether there was one."""
    reported = None
    while jobs := list_jobs(Path.cwd()):
        if jobs != reported:
            reported = jobs
            _print(f"waiting for the jobs of the killed run in Slurm (scancel ends them): {', '.join(jobs)}")
        time.sleep(POLL_S)
    return reported is not None


def list_jobs(folder: Path) -> list[str]:
    """Return number and rule of the user's jobs of this folder's workflow that wait or run in Slurm."""
    if not shutil.which(LIST_JOBS[0]):
        return []
    result = subprocess.run(LIST_JOBS, capture_output=True, text=True)
    if result.returncode:
        reason = " ".join(result.stderr.split())
        raise InputError(
            f"squeue cannot list the jobs that the last run on a cluster may have left ({reason}). Try again when it "
            "answers"
        )
    # comments of jobs may contain any character, also line breaks; names of folders may contain any except line breaks
    jobs = [line.partition("|") for line in result.stdout.splitlines()]
    prefix = f"{folder}|"
    rules = [(job, rest.removeprefix(prefix)) for job, _, rest in jobs if rest.startswith(f"{prefix}{COMMENT_PREFIX}")]
    return [f"{job} ({rule})" for job, rule in rules]


def _print(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
