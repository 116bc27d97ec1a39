"""Processes that were killed by the kernel for lack of memory, by the user or by a scheduler."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.diagnosis.signature import Evidence, Explanation, Signature, StageLog, fixed_explanation
from dj2mgm.memory.cgroups import CgroupLimits, read_limits, total_memory
from dj2mgm.memory.memory_csv import format_gib, last_row

# Processes killed by the kernel's out-of-memory killer, read from the kernel log if permissions allow it.

KILL = re.compile(
    r"(?P<cgroup>Memory cgroup out of memory)?.*\bKilled process (?P<pid>\d+) \((?P<name>[^)]*)\),?"
    r".*?anon-rss:(?P<anonymous>\d+)kB(?:.*?shmem-rss:(?P<shared>\d+)kB)?"
)
RECORD = re.compile(r"\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<message>[^\n]*)")


@dataclass(frozen=True)
class OomKill:
    """Process that the out-of-memory killer ended."""

    pid: int
    name: str
    held: int  # bytes of resident anonymous and shared memory
    by_limit: bool  # True: a control group's limit was reached; False: the machine's memory was full
    time: float  # seconds since the epoch


def parse_kernel_log(records: str, booted: float) -> list[OomKill]:
    """Return the kills in the kernel's records.

    Args:
        records: text of /dev/kmsg, "<priority>,<number>,<microseconds since boot>,<flags>;<message>" per line.
        booted: boot time, in seconds since the epoch.
    """
    kills = []
    for record in RECORD.finditer(records):
        if kill := KILL.search(record["message"]):
            held = (int(kill["anonymous"]) + int(kill["shared"] or 0)) * 1024
            when = booted + int(record["microseconds"]) / 1e6
            kills.append(OomKill(int(kill["pid"]), kill["name"], held, bool(kill["cgroup"]), when))
    return kills


def read_kernel_kills(device: Path = Path("/dev/kmsg")) -> list[OomKill] | None:
    """Return the kills in the kernel log; None if this user may not read it."""
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records = b""
    try:
        while record := os.read(descriptor, 1 << 16):  # one record at a time
            records += record
    except BlockingIOError:  # no record is left
        pass
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return parse_kernel_log(records.decode("utf-8", errors="replace"), booted)


# Explanations of a kill.

NEAR_S = 600  # longest time between a kill and the last line of its log
LOOK = "sudo dmesg -T | grep -i 'killed process'"
LESS = (
    "set deepspeed: zero3_offload with LoRA instead of full fine-tuning (the optimizer state of every trained weight "
    "is in host memory), lower loader_workers and micro_batch_size, end other programs, or add memory or swap"
)


def describe_kill(
    kills: list[OomKill] | None, limits: CgroupLimits, total: int, reading: dict[str, str] | None = None
) -> Explanation:
    """Explain signal 9.

    Args:
        kills: the kernel's records near the log's end; None if they cannot be read.
        limits: the limits of this job.
        total: bytes of memory in this machine.
        reading: the last row of the stage's memory.csv.
    """
    memory = describe_memory(limits, total)
    if reading:
        memory += f"; in its last reading (phase {reading['phase']}) the job held {reading['job_gib']} GiB"
        memory += f" and the whole machine {reading['host_gib']} GiB"
    if kills:
        kill = kills[-1]
        reason = "the job's memory limit was reached" if kill.by_limit else "the machine's memory was full"
        process = f"process {kill.pid} ({kill.name}), which held {format_gib(kill.held)}"
        return Explanation(f"{reason}; the kernel's out-of-memory killer ended {process}; {memory}", LESS)
    if limits.oom_kills and limits.memory:
        ended = f"it has ended {limits.oom_kills} process(es) here"
        return Explanation(
            f"the job's memory limit of {format_gib(limits.memory)} was reached; {ended}; {memory}", LESS
        )
    record = "may not be read by this user" if kills is None else "holds no record of it"
    return Explanation(
        f"the process was ended with signal 9. The kernel does this if memory runs out, but its log {record}; {memory}",
        f"look with `{LOOK}`, and in the scheduler's own log. If memory ran out: {LESS}",
    )


def describe_memory(limits: CgroupLimits, total: int) -> str:
    usable = (
        f", of which this job may use {format_gib(limits.memory)}" if limits.memory and limits.memory < total else ""
    )
    return f"this machine has {format_gib(total)}{usable}"


def find_kills(log: StageLog) -> list[OomKill] | None:
    """Return the kernel's records near the log's end; None if they cannot be read."""
    kills, written = read_kernel_kills(), log.path.stat().st_mtime
    return kills and [kill for kill in kills if abs(kill.time - written) < NEAR_S]


def explain_kill(evidence: Evidence) -> Explanation:
    readings = evidence.log.path.parent / "checkpoints" / "memory.csv"
    reading = last_row(readings) if readings.is_file() else None
    return describe_kill(find_kills(evidence.log), read_limits(), total_memory(), reading)


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
            "the stage was ended by Ctrl-C, `kill`, or a scheduler at its time limit",
            "run the same command again; a training stage continues from its last complete checkpoint. If the time "
            "limit was reached, raise it (`runtime` of the rule: --set-resources finetune:runtime=<minutes>)",
        ),
        symptom=True,
    ),
)
