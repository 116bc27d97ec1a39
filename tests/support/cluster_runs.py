"""Runs of the small project on Slurm, and actions on them while they run."""

import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from one_machine_slurm import NODE, jobs, kill_job_processes, slurm, update, wait_until
from small_project import Project

STAGE_TIMEOUT_S = 900  # on a busy machine
SLURM_PROFILE = (
    "--profile=profiles/slurm",
    "--slurm-status-command=squeue",  # there is no accounting database
    "--slurm-init-seconds-before-status-checks=1",
    "--slurm-keep-successful-logs",
)
# -P keeps the folder of the helpers out of sys.path
FAST_POLLING_SNAKEMAKE = (sys.executable, "-P", str(Path(__file__).with_name("fast_polling_snakemake.py")))
GENERIC_PROFILE = ("--profile=profiles/cluster-generic", "--seconds-between-status-checks=1")


@dataclass
class ClusterRun:
    """Running Snakemake on the cluster, with its output in `snakemake.log` in the project's folder."""

    project: Project
    arguments: tuple[str, ...]
    config: tuple[str, ...] = ()
    process: subprocess.Popen = field(init=False)

    def start(self) -> None:
        with open(self.project.folder / "snakemake.log", "a") as log:
            self.process = subprocess.Popen(
                [*FAST_POLLING_SNAKEMAKE, *self.project.arguments(*self.arguments, config=self.config)],
                cwd=self.project.folder,
                env=self.project.environment(),
                stdout=log,
                stderr=log,
            )

    def printed(self) -> str:
        return (self.project.folder / "snakemake.log").read_text()

    def kill(self) -> None:
        """Kill Snakemake with SIGKILL; its jobs continue."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End Snakemake, for `contextlib.closing`."""
        if self.process.poll() is None:
            self.kill()

    def kill_stages(self) -> None:
        """Kill the processes that Snakemake runs on this machine with SIGKILL."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def finish(self, timeout_s: float = STAGE_TIMEOUT_S) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        assert self.process.poll() == 0, self.printed()[-4000:]

    def wait_for_checkpoint(self, stage: str, experiment: str) -> str:
        """Wait for a stage's first checkpoint and return the number of its training job."""
        checkpoints = self.project.result(stage, experiment) / "checkpoints"

        def has_checkpoint() -> bool:
            assert self.process.poll() is None, self.printed()[-4000:]
            return any(checkpoints.glob("*/complete.json"))

        wait_until(has_checkpoint, f"checkpoint of {experiment}/{stage}", STAGE_TIMEOUT_S)
        return self.running_job(stage)

    def running_job(self, rule: str) -> str:
        """Return the number of the only running job of a rule."""
        [job] = [job for job in self.all_jobs() if job["JobState"] == "RUNNING" and read_rule(job) == rule]
        return job["JobId"]

    def jobs(self, rule: str, name: str) -> list[dict[str, str]]:
        """Return all Slurm jobs of a rule for an experiment, or for the dataset, in order."""
        comment = f"rule_{rule}_wildcards_{find_wildcards(name)}"
        return [job for job in self.all_jobs() if job["Comment"] == comment]

    def all_jobs(self) -> list[dict[str, str]]:
        project_jobs = [job for job in jobs() if job["WorkDir"] == str(self.project.folder)]
        return sorted(project_jobs, key=lambda job: int(job["JobId"]))

    def logs(self, rule: str, name: str) -> str:
        """Return the output of a rule's jobs, of all attempts in order."""
        folder = self.project.folder / ".snakemake/slurm_logs" / f"rule_{rule}" / find_wildcards(name)
        return "".join(path.read_text() for path in sorted(folder.glob("*.log"), key=lambda path: int(path.stem)))


def find_wildcards(name: str) -> str:
    """Return the wildcards in Slurm's names: the dataset, or the folder of an experiment's run."""
    return name if name == "small" else f"small_small_{name}"


def completed(jobs: list[dict[str, str]]) -> Counter:
    """Count the completed jobs of each rule."""
    return Counter(read_rule(job) for job in jobs if job["JobState"] == "COMPLETED")


def read_rule(job: dict[str, str]) -> str:
    return re.fullmatch(r"rule_(\w+?)(_wildcards_.*)?", job["Comment"])[1]


def fail_node() -> None:
    """Drain a node, let it and its jobs fail, and bring it back."""
    update("nodename", NODE, state="drain", reason="test")
    assert list_node_jobs("running"), "a drained node lets its jobs run"
    update("nodename", NODE, state="down", reason="test")
    kill_job_processes(NODE)  # a dead job leaves no Snakemake process that waits for outputs and removes them
    wait_until(lambda: not list_node_jobs("running,completing"), "the node's jobs")
    update("nodename", NODE, state="resume")


def list_node_jobs(states: str) -> str:
    return slurm("squeue", "--noheader", f"--nodelist={NODE}", f"--states={states}")


def end_at_time_limit(job: str) -> None:
    """Let a job reach its time limit, and suspend it until then, because a small stage ends within a second."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job:
                process.suspend()
    update("jobid", job, EndTime="now+1")
    wait_until(lambda: job not in slurm("squeue", "--noheader", "--format=%i"), "the job's end", 120)
    time.sleep(1)
