"""Taking over from a Snakemake that was killed in this folder, so that the same command simply goes on.

What it leaves behind: a lock, which does not say whose it is; stages that go on without it on this machine; and jobs
on a cluster. Snakemake would refuse the first and start the others once more beside themselves. So each run notes who
it is, and the next one removes the lock of a dead run and ends its stages, which nobody waits for any more. Jobs in
Slurm record by themselves that they are done: they are waited for.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from errors import InputError
from files import write_json

STATE = Path(".snakemake")
OWNER = STATE / "owner.json"
LOCKS = STATE / "locks"
# %i is a job's number, %Z the folder it was submitted from, %k a comment: both cluster profiles have the rule there
LIST_JOBS = ["squeue", "--me", "--noheader", "--format=%i|%Z|%k"]
COMMENT = "rule_"
POLL_S = 5
DRY_RUN = re.compile("-[a-zA-Z]*n[a-zA-Z]*|--dry-?run")  # -n, also among other letters
ONLY_SHOWS = {"--dag", "--rulegraph", "--filegraph", "--d3dag", "--lint", "--summary", "-S", "--detailed-summary", "-D"}
ONLY_SHOWS |= {"--list-rules", "--list", "-l", "--list-target-rules", "--lt", "--report"}


def note_owner(on_cluster: bool) -> None:
    """This process runs the workflow in the current folder."""
    process = psutil.Process()
    owner = {
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "process_group": os.getpgrp(),
        "on_cluster": on_cluster,
    }
    write_json(OWNER, owner)


def runs_jobs(arguments: list[str]) -> bool:
    """Whether a command line of Snakemake asks for work, and not only what there is to do: while the Snakefile is read,
    Snakemake itself cannot say. `--unlock` counts: without the lock, a killed run's stages would not be found."""
    return not any(argument in ONLY_SHOWS or DRY_RUN.fullmatch(argument) for argument in arguments)


def at_work() -> bool:
    """Whether a run is at work in the current folder; of one on another host, or of which
    there is no note, only the lock can be seen."""
    owner = _noted_owner()
    return _alive(owner) if owner and owner["host"] == socket.gethostname() else _locked()


def take_over() -> None:
    """Remove what a run that was killed left here; return when none of its jobs is left in Slurm.

    Where a run holds the lock that is alive, or on another host and perhaps alive, or not known, Snakemake itself says
    so, and what to do.
    """
    owner = _noted_owner()
    if owner is None:
        return
    if _locked() and owner["host"] == socket.gethostname() and not _alive(owner):
        _say("the last run in this folder was killed; going on from where it was")
        _end_stages(owner)
        shutil.rmtree(LOCKS)
    if not _locked() and owner.get("on_cluster"):
        _wait_for_jobs()


def _noted_owner() -> dict | None:
    """Who ran the workflow here last; None if nobody did, or if the note is damaged."""
    try:
        owner = json.loads(OWNER.read_text(encoding="utf-8"))
        whole = (
            isinstance(owner["host"], str)
            and type(owner["pid"]) is int
            and owner["pid"] > 0
            and isinstance(owner["started"], float)
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return owner if whole else None


def _end_stages(owner: dict) -> None:
    for process in psutil.process_iter(["cmdline", "cwd"]):
        in_folder = process.info["cwd"] == str(Path.cwd())
        if in_folder and any("workflow_scripts/" in part for part in process.info["cmdline"] or ()):
            try:
                if os.getpgid(process.pid) == owner.get("process_group"):
                    process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass


def _wait_for_jobs() -> None:
    said = None
    while left := jobs_in(Path.cwd()):
        if left != said:
            said = left
            _say(f"waiting for what the killed run left in Slurm (scancel ends it): {', '.join(left)}")
        time.sleep(POLL_S)


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


def _locked() -> bool:
    return any(LOCKS.glob("*.lock"))


def _alive(owner: dict) -> bool:
    try:
        return psutil.Process(owner["pid"]).create_time() == owner["started"]
    except psutil.NoSuchProcess:
        return False


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
