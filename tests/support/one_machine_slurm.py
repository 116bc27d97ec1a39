"""A real Slurm on this machine (munged, slurmctld and slurmd) that starts and ends with the tests.

A node declares more processors and memory than the machine has, so that the rules' jobs fit, and /dev/null as its GPU.
Only the partition `both` has a second node like it. There is no accounting database. Slurm's own accounting kills jobs
that exceed their memory, without cgroups, which containers rarely have. A restarted job waits for `cred_expire`, two
minutes by default.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "rsync")
CONFIGURATION = Path("/etc/slurm")  # fixed, because Snakemake's plugin removes SLURM_ variables, also SLURM_CONF
START_TIMEOUT_S = 30
NODE = os.uname().nodename
SECOND = f"{NODE}2"
CLUSTER = "dj2mgm-tests"

SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost={node}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
JobFileAppend=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
MinJobAge=86400
KillWait=2
ReturnToService=2
NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port=17001 CPUs=32 RealMemory=200000 Gres=gpu:1 State=UNKNOWN
NodeName={second} NodeHostname={node} NodeAddr=127.0.0.1 Port=17002 CPUs=32 RealMemory=200000 Gres=gpu:1 State=UNKNOWN
PartitionName=tests Nodes={node} Default=YES MaxTime=INFINITE State=UP
PartitionName=both Nodes={node},{second} MaxTime=INFINITE State=UP
"""
GRES_CONF = "NodeName={node},{second} Name=gpu File=/dev/null\n"


def why_not() -> str | None:
    """Return the reason why Slurm cannot start here, or None."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        return f"needs Slurm: no {', '.join(missing)} (on Debian: apt-get install slurm-wlm munge rsync)"
    if os.geteuid() != 0:
        return "starts Slurm's daemons, which needs root"
    configuration = CONFIGURATION / "slurm.conf"
    if configuration.exists() and f"ClusterName={CLUSTER}\n" not in configuration.read_text():
        return f"{configuration} exists: this machine's own Slurm is left alone"
    if configuration.exists() and "UP" in slurm("scontrol", "ping"):
        return "another run of these tests has its Slurm up"
    return None  # also if a killed run left its configuration


@contextmanager
def running_slurm(folder: Path) -> Iterator[None]:
    """Run Slurm until the block ends, with its state and logs in `folder`."""
    configuration_files = {CONFIGURATION / "slurm.conf": SLURM_CONF, CONFIGURATION / "gres.conf": GRES_CONF}
    daemons = []
    try:
        for path, text in configuration_files.items():
            path.write_text(text.format(cluster=CLUSTER, node=NODE, second=SECOND, folder=folder))
        for name in ("state", f"spool/{NODE}", f"spool/{SECOND}", "munge"):
            (folder / name).mkdir(parents=True)
        os.chmod(folder, 0o755)
        (folder / "munge/key").write_bytes(os.urandom(128))
        os.chmod(folder / "munge/key", 0o600)
        munge_flags = [f"--{kind}-file={folder}/munge/{kind}" for kind in ("key", "log", "pid", "seed")]
        daemons.append(
            start(folder, "munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge_flags)
        )
        wait_until(lambda: (folder / "munge/socket").exists(), "munged")
        daemons.append(start(folder, "slurmctld", "-D", "-c"))
        daemons += [start(folder, "slurmd", "-D", "-N", node) for node in (NODE, SECOND)]
        wait_until(
            lambda: slurm("sinfo", "--noheader", "--partition=both", "--format=%t %D").split() == ["idle", "2"],
            "slurmd",
        )
        yield
    finally:
        if len(daemons) == 4:
            slurm("scancel", "--me")
            with suppress(AssertionError):  # the loop below ends the remaining processes
                wait_until(lambda: not slurm("squeue", "--noheader"), "scancel")
        for daemon in reversed(daemons):
            stop_daemon(daemon)
        kill_job_processes(NODE, SECOND)
        for path in configuration_files:
            path.unlink(missing_ok=True)


def kill_job_processes(*nodes: str) -> None:
    """End all processes of jobs on the nodes, including orphans, which Slurm does not find without cgroups."""
    while processes := [process for process in psutil.process_iter() if is_in_job(process, nodes)]:
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)


def is_in_job(process: psutil.Process, nodes: tuple[str, ...]) -> bool:
    with suppress(psutil.Error):
        environment = process.environ()
        return environment.get("SLURM_CLUSTER_NAME") == CLUSTER and environment.get("SLURMD_NODENAME") in nodes
    return False


def stop_daemon(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()


def start(folder: Path, program: str, *arguments: str) -> subprocess.Popen:
    with open(folder / f"{program}.out", "w") as output:
        return subprocess.Popen([program, *arguments], stdout=output, stderr=output, cwd=folder)


def wait_until(condition, description: str, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{description}: nothing after {timeout_s} s"
        time.sleep(0.1)


def slurm(*command: str) -> str:
    """Return the output of one of Slurm's commands; empty if it failed."""
    return subprocess.run(command, capture_output=True, text=True).stdout


def update(kind: str, name: str, **values: str) -> None:
    """Change a job or a node like an administrator."""
    changes = [f"{key}={value}" for key, value in values.items()]
    subprocess.run(["scontrol", "update", f"{kind}={name}", *changes], check=True)


def jobs() -> list[dict[str, str]]:
    """Return every job since Slurm's start, including finished ones, with the fields of `scontrol show job`."""
    lines = slurm("scontrol", "--oneliner", "show", "job").splitlines()
    return [dict(re.findall(r"(\S+?)=(.*?) *(?= \S+?=|$)", line)) for line in lines if line.startswith("JobId=")]
