"""Processes that were ended from outside: by the kernel, for want of memory, by the user or a scheduler."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.diagnosis.signature import Evidence, Explanation, Signature, StageLog, fixed_explanation
from dj2mgm.memory.cgroups import CgroupLimits, read_limits, total_memory
from dj2mgm.memory.memory_csv import gib, last_row

# Which processes the kernel's out-of-memory killer has ended, from the kernel's own log, where that may be read.

KILL = re.compile(
    r"(?P<cgroup>Memory cgroup out of memory)?.*\bKilled process (?P<pid>\d+) \((?P<name>[^)]*)\),?"
    r".*?anon-rss:(?P<anonymous>\d+)kB(?:.*?shmem-rss:(?P<shared>\d+)kB)?"
)
RECORD = re.compile(r"\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<message>[^\n]*)")


@dataclass(frozen=True)
class OomKill:
    pid: int
    name: str
    held: int  # bytes: resident anonymous and shared memory
    by_limit: bool  # a control group's limit was reached; otherwise the machine's memory was full
    time: float  # seconds since the epoch


def parse_kernel_log(records: str, booted: float) -> list[OomKill]:
    """
    Args:
        records: of /dev/kmsg: "<priority>,<number>,<microseconds since boot>,<flags>;<message>".
        booted: seconds since the epoch.
    """
    kills = []
    for record in RECORD.finditer(records):
        if kill := KILL.search(record["message"]):
            held = (int(kill["anonymous"]) + int(kill["shared"] or 0)) * 1024
            when = booted + int(record["microseconds"]) / 1e6
            kills.append(OomKill(int(kill["pid"]), kill["name"], held, bool(kill["cgroup"]), when))
    return kills


def read_kernel_kills(device: Path = Path("/dev/kmsg")) -> list[OomKill] | None:
    """None where this user may not read the kernel's log."""
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records = b""
    try:
        while record := os.read(descriptor, 1 << 16):  # one record at a time
            records += record
    except BlockingIOError:  # that was the last one
        pass
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return parse_kernel_log(records.decode("utf-8", errors="replace"), booted)


# Processes that were ended from outside: by the kernel, for want of memory, by the user or by a scheduler.

NEAR_S = 600  # a kill belongs to a log that was last written at most so long before or after it
LOOK = "sudo dmesg -T | grep -i 'killed process'"
LESS = (
    "set deepspeed: zero3_offload with LoRA rather than a full fine-tune (the optimizer's state of every trained "
    "weight lies in host memory), lower loader_workers and micro_batch_size, end other programs, or add memory or "
    "swap"
)


def describe_kill(
    kills: list[OomKill] | None, limits: CgroupLimits, total: int, reading: dict[str, str] | None = None
) -> Explanation:
    """
    Args:
        kills: the kernel's records near the log's end; None where they cannot be read.
        total: bytes of memory in this machine.
        reading: the last row of the stage's memory.csv.
    """
    there = f"this machine has {gib(total)}"
    if limits.memory and limits.memory < total:
        there += f", of which this job may use {gib(limits.memory)}"
    if reading:
        there += f"; in its last reading (phase {reading['phase']}) the job held {reading['job_gib']} GiB"
        there += f" and the whole machine {reading['host_gib']} GiB"
    if kills:
        kill = kills[-1]
        whose = "the job's memory limit was reached" if kill.by_limit else "the machine's memory was full"
        held = f"process {kill.pid} ({kill.name}), which held {gib(kill.held)}"
        return Explanation(f"{whose}: the kernel's out-of-memory killer ended {held}; {there}", LESS)
    if limits.oom_kills and limits.memory:
        ended = f"it has ended {limits.oom_kills} process(es) here"
        return Explanation(f"the job's memory limit of {gib(limits.memory)} was reached: {ended}; {there}", LESS)
    record = "may not be read by this user" if kills is None else "holds no record of it"
    return Explanation(
        f"something ended the process with signal 9. That is what the kernel does when memory runs out, but its log "
        f"{record}; {there}",
        f"look with `{LOOK}`, and at the scheduler's own log. If it was memory: {LESS}",
    )


def kills_near(log: StageLog) -> list[OomKill] | None:
    """Return the kernel's records near the log's end; None if they cannot be read."""
    kills, written = read_kernel_kills(), log.path.stat().st_mtime
    return kills and [kill for kill in kills if abs(kill.time - written) < NEAR_S]


def explain_kill(evidence: Evidence) -> Explanation:
    readings = evidence.log.path.parent / "checkpoints" / "memory.csv"
    reading = last_row(readings) if readings.is_file() else None
    return describe_kill(kills_near(evidence.log), read_limits(), total_memory(), reading)


SIGNATURES = (
    Signature(
        "Killed with signal 9",
        r"exits with return code = -9\b|^exit status 137$"
        r"|DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Killed",
        explain_kill,
        symptom=True,
    ),
    Signature(
        "Stopped from outside",
        r"^(?:\[rank\d+\]: )?KeyboardInterrupt$|Main process received SIG(?:INT|TERM), exiting"
        r"|^exit status (?:130|143)$|CANCELLED AT \S+ DUE TO TIME LIMIT",
        fixed_explanation(
            "somebody asked the stage to end: Ctrl-C, `kill`, or a scheduler at its time limit",
            "run the same command again: a training stage goes on from its last complete checkpoint. If it was the "
            "time limit, ask for more (`runtime` of the rule: --set-resources finetune:runtime=<minutes>)",
        ),
        symptom=True,
    ),
)
