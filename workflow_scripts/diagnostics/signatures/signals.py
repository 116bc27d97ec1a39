"""Processes that were ended from outside: by the kernel, for want of memory, by the user or by a scheduler."""

from diagnostics.cgroups import CgroupLimits, read_limits, total_memory
from diagnostics.kernel_kills import OomKill, read_kernel_kills
from diagnostics.memory_csv import last_row
from diagnostics.signature import Explanation, Found, Signature, says
from diagnostics.sizes import gib

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


def explain_kill(found: Found) -> Explanation:
    kills, written = read_kernel_kills(), found.log.path.stat().st_mtime
    near = kills and [kill for kill in kills if abs(kill.time - written) < NEAR_S]
    readings = found.log.path.parent / "checkpoints" / "memory.csv"
    reading = last_row(readings) if readings.is_file() else None
    return describe_kill(near, read_limits(), total_memory(), reading)


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
        says(
            "somebody asked the stage to end: Ctrl-C, `kill`, or a scheduler at its time limit",
            "run the same command again: a training stage goes on from its last complete checkpoint. If it was the "
            "time limit, ask for more (`runtime` of the rule: --set-resources finetune:runtime=<minutes>)",
        ),
        symptom=True,
    ),
)
