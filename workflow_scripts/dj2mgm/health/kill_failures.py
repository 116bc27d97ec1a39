"""Failures by a signal: processes that the kernel, a user or a scheduler ended, and the kernel's records of them."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature
from dj2mgm.health.log_text import StageLog
from dj2mgm.monitoring.cgroups import CgroupLimits, read_cgroup_limits, read_total_memory
from dj2mgm.monitoring.memory_csv import format_gib, read_last_row

KILL_MESSAGE = re.compile(
    r"(?P<cgroup>Memory cgroup out of memory)?.*\bKilled process (?P<pid>\d+) \((?P<name>[^)]*)\),?"
    r".*?anon-rss:(?P<anonymous>\d+)kB(?:.*?shmem-rss:(?P<shared>\d+)kB)?"
)
KERNEL_RECORD = re.compile(r"\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<message>[^\n]*)")
NEAR_S = 600  # longest time between a kill and the last line of its log
SCHEDULER_KILL = re.compile(
    r"oom[_-]kill event|have been OOM Killed|task \d+: Out Of Memory|^.*slurmstepd: error: .*exceeded memory limit",
    re.M,
)
KERNEL_LOG_COMMAND = "sudo dmesg -T | grep -i 'killed process'"
REDUCE_HOST_MEMORY_REMEDY = (
    "set deepspeed: zero3_offload with LoRA instead of full fine-tuning (the optimizer state of every trained weight "
    "is in host memory), lower loader_workers and micro_batch_size, end other programs, or add memory or swap"
)


@dataclass(frozen=True)
class OomKill:
    """Process that the out-of-memory killer ended."""

    pid: int
    name: str
    memory_bytes: int  # bytes of resident anonymous and shared memory
    by_limit: bool  # True: a control group's limit was reached; False: the machine's memory was full
    time: float  # seconds since the epoch


def parse_kernel_log(records: str, booted: float) -> list[OomKill]:
    """Return the kills in the kernel's records, the text of /dev/kmsg; `booted` is in seconds since the epoch.

    A record is "<priority>,<number>,<microseconds since boot>,<flags>;<message>".
    """
    kills = []
    for record in KERNEL_RECORD.finditer(records):
        if kill := KILL_MESSAGE.search(record["message"]):
            memory_bytes = (int(kill["anonymous"]) + int(kill["shared"] or 0)) * 1024
            kill_time = booted + int(record["microseconds"]) / 1e6
            kills.append(OomKill(int(kill["pid"]), kill["name"], memory_bytes, bool(kill["cgroup"]), kill_time))
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


def describe_kill(
    kills: list[OomKill] | None, limits: CgroupLimits, total: int, reading: dict[str, str] | None = None
) -> Explanation:
    """Explain signal 9 by the kernel's records near the log's end, None if they cannot be read.

    `limits` are those of this job, `total` the bytes of memory in this machine, `reading` the last row of memory.csv.
    """
    memory = describe_memory(limits, total)
    if reading:
        memory += f"; in its last reading (phase {reading['phase']}) the job held {reading['job_gib']} GiB"
        memory += f" and the whole machine {reading['host_gib']} GiB"
    if kills:
        kill = kills[-1]
        reason = "the job's memory limit was reached" if kill.by_limit else "the machine's memory was full"
        process = f"process {kill.pid} ({kill.name}), which held {format_gib(kill.memory_bytes)}"
        return Explanation(
            f"{reason}; the kernel's out-of-memory killer ended {process}; {memory}", REDUCE_HOST_MEMORY_REMEDY
        )
    if limits.oom_kills and limits.memory:
        ended = f"it has ended {limits.oom_kills} process(es) here"
        return Explanation(
            f"the job's memory limit of {format_gib(limits.memory)} was reached; {ended}; {memory}",
            REDUCE_HOST_MEMORY_REMEDY,
        )
    record = "may not be read by this user" if kills is None else "holds no record of it"
    return Explanation(
        f"the process was ended with signal 9. The kernel does this if memory runs out, but its log {record}; {memory}",
        f"look with `{KERNEL_LOG_COMMAND}`, and in the scheduler's own log. If memory ran out: "
        f"{REDUCE_HOST_MEMORY_REMEDY}",
    )


def describe_memory(limits: CgroupLimits, total: int) -> str:
    usable = (
        f", of which this job may use {format_gib(limits.memory)}" if limits.memory and limits.memory < total else ""
    )
    return f"this machine has {format_gib(total)}{usable}"


def find_kills(log: StageLog) -> list[OomKill] | None:
    """Return the kernel's records near the log's end; None if they cannot be read."""
    kills, log_time = read_kernel_kills(), log.path.stat().st_mtime
    if kills is None:
        return None
    return [kill for kill in kills if abs(kill.time - log_time) < NEAR_S]


def explain_kill(evidence: Evidence) -> Explanation:
    if SCHEDULER_KILL.search(evidence.match[0]):
        return Explanation(
            "the scheduler ended a process of this job, because the job had used all memory that it requested",
            f"request more (`--set-resources finetune:mem_mb=<MiB>`, with the name of the rule), or "
            f"{REDUCE_HOST_MEMORY_REMEDY}",
        )
    readings = evidence.log.path.parent / "checkpoints" / "memory.csv"
    reading = read_last_row(readings) if readings.is_file() else None
    return describe_kill(find_kills(evidence.log), read_cgroup_limits(), read_total_memory(), reading)


def explain_stop(cause: str, remedy: str) -> Callable[[Evidence], Explanation | None]:
    """Return a function with a fixed explanation, unless the scheduler ended the job because of its memory."""

    def explain(evidence: Evidence) -> Explanation | None:
        return None if SCHEDULER_KILL.search(evidence.log.text) else Explanation(cause, remedy)

    return explain


SIGNAL_SIGNATURES = (
    Signature(
        "Killed with signal 9",
        r"exits with return code = -9\b|^exit status 137$|\bexitcode *: -9\b|Signal 9 \(SIGKILL\)"
        r"|DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Killed"
        rf"|{SCHEDULER_KILL.pattern}",
        explain_kill,
        symptom=True,
    ),
    Signature(
        "Stopped from outside",
        r"^(?:\[rank\d+\]: )?KeyboardInterrupt$|Main process received SIG(?:INT|TERM), exiting"
        r"|^exit status (?:130|143)$|slurmstepd: error: \*\*\* (?:JOB|STEP) .*CANCELLED AT \S+"
        r"|\bexitcode *: -15\b|Signal 15 \(SIGTERM\) received",
        explain_stop(
            "the stage was ended by Ctrl-C, `kill`, or a scheduler (`scancel`, its time limit, a more important job, "
            "or the failure of its node)",
            "run the same command again; a training stage continues from its last complete checkpoint. If the time "
            "limit was reached, raise it (`runtime` of the rule: --set-resources finetune:runtime=<minutes>)",
        ),
        symptom=True,
    ),
)
