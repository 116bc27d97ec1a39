"""Failures of the system: signals, main memory, files, disks and shared memory, images, and damaged weights."""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature, StageLog
from dj2mgm.monitoring.memory_files import (
    CgroupLimits,
    format_gib,
    read_cgroup_limits,
    read_last_row,
    read_total_memory,
)

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
RERUN_REMEDY = "then run the same command again; a stage continues from its saved state"
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


def explain_stop(evidence: Evidence) -> Explanation | None:
    """Explain a signal from outside, unless the scheduler ended the job because of its memory."""
    if SCHEDULER_KILL.search(evidence.log.text):
        return None
    return Explanation(
        "the stage was ended by Ctrl-C, `kill`, or a scheduler (`scancel`, its time limit, a more important job, "
        "or the failure of its node)",
        "run the same command again; a training stage continues from its last complete checkpoint. If the time "
        "limit was reached, raise it (`runtime` of the rule: --set-resources finetune:runtime=<minutes>)",
    )


FULL_BYTES = 2**30  # a disk with less free space is called full
SHARED_MEMORY = "/dev/shm"


def explain_full(evidence: Evidence) -> Explanation | None:
    """Explain a full disk by the space and the inodes that are free now; shared memory has another signature."""
    if SHARED_MEMORY in evidence.line or "</torch_" in evidence.line:
        return None
    path = evidence.match["path"]
    folder = Path(path).parent if path and Path(path).parent.is_dir() else evidence.log.path.resolve().parent
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    message = f"a file could not be written{f' ({path})' if path else ''}, because there was no space for it"
    if system.f_files and not system.f_favail:
        now = f"The file system of {folder} has no inodes left, so it can hold no more files"
    elif free < FULL_BYTES:
        now = f"The file system of {folder} has {format_gib(free)} free"
    else:
        now = (
            f"The file system of {folder} has {format_gib(free)} free now. So it was full for some time only, or a "
            "quota (`quota -s`), a limit of file sizes (`ulimit -f`) or another file system was"
        )
    return Explanation(
        f"{message}. {now}",
        "free space (`df -h`, `df -i`; `du -sh results/* ~/.cache/* /tmp`), then run the same command again; a stage "
        "continues from its last complete checkpoint",
    )


def explain_shared_memory(evidence: Evidence) -> Explanation:
    folder = Path(SHARED_MEMORY)
    size = ""
    if folder.is_dir():
        usage = shutil.disk_usage(folder)
        size = f" ({format_gib(usage.total)}, of which {format_gib(usage.free)} are free now)"
    return Explanation(
        f"{SHARED_MEMORY}{size}, through which data loaders and NCCL pass data between processes, was full",
        "enlarge it for the container (`docker run --shm-size=8g` or `--ipc=host`), delete files that killed processes "
        f"left in {SHARED_MEMORY}, or set loader_workers: 0",
    )


def build_error_pattern(number: int, message: str) -> str:
    """Return a pattern of the system's error as Python, Rust libraries and shells print it."""
    return (
        rf"\[Errno {number}\] {message}(?:: '(?P<path>[^'\n]*)')?|\b{message} \(os error {number}\)|(?m:: {message}$)"
    )


def explain_memory(evidence: Evidence) -> Explanation:
    memory = describe_memory(read_cgroup_limits(), read_total_memory())
    return Explanation(
        f"a process requested more main memory than was available; {memory}. A limit of the shell (`ulimit -v`) "
        "produces the same message",
        REDUCE_HOST_MEMORY_REMEDY,
    )


def explain_worker(evidence: Evidence) -> Explanation:
    """Explain the end of a worker process by the kernel's record of it, if there is one."""
    if kills := find_kills(evidence.log):
        return describe_kill(kills, read_cgroup_limits(), read_total_memory())
    return Explanation(
        "a worker process ended before it returned its result, without a message. The usual reason is that the kernel "
        "killed it for lack of memory; a crash in a library is another one",
        f"look with `{KERNEL_LOG_COMMAND}`. If memory ran out: {REDUCE_HOST_MEMORY_REMEDY}",
    )


SYSTEM_SIGNATURES = (
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
        explain_stop,
        symptom=True,
    ),
    Signature(
        "A relative path leads nowhere",
        # not a bare word, which is a program that is not installed
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>(?!/)[^']*[./][^']*)'",
        "'{path}' is a relative path, and this file does not exist below the folder in which the command was started",
        "start commands in the project's folder. Image paths in a dataset are relative to its image folder "
        "(`images` in config/datasets/<name>.yaml); the rule write_jsonl makes them absolute",
    ),
    Signature(
        "An image cannot be read",
        r"UnidentifiedImageError: cannot identify image file '?(?P<path>[^'\n]*)'?"
        r"|BadImageError: (?:undecodable|empty|missing): (?P<image>.*)"
        r"|OSError: image file is truncated"
        r"|OSError: (?:broken data stream when reading|unrecognized data stream contents when reading) image file",
        "an image is damaged, incomplete or not an image {path}{image}",
        "replace the file or remove its row from the dataset. Every image is opened once before training; "
        "`jsonl.on_bad_row: drop` omits bad ones and counts them. If the image was valid then, it has changed "
        "since; run again with `--forcerun make_dataset`, which checks all images",
    ),
    Signature(
        "Access to a gated model",
        r"trying to access a gated repo|GatedRepoError|Cannot access gated repo|Access to model \S+ is restricted",
        "the model or dataset is gated, and this machine has no token of an account that may download it",
        "accept the terms on its page of the hub, run `hf auth login`, then `snakemake fetch --config "
        "model=<model>`; stages themselves download nothing",
    ),
    Signature(
        "Shared memory is full",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error"
        r"|unable to (?:write to|allocate shared memory\(shm\) for|mmap \d+ bytes from) file </torch_\w+>"
        r"|</torch_\w+>.*No space left on device"
        r"|/dev/shm/.*No space left on device|No space left on device.*/dev/shm/",
        explain_shared_memory,
    ),
    Signature(
        "The disk is full",
        r"(?:No space left on device|\[Errno 28\][^':\n]*)(?:: '(?P<path>[^'\n]+)')?|Disk quota exceeded"
        r"|OperationalError: database or disk is full|PytorchStreamWriter failed writing file"
        r"|inline_container\.cc:\d+\] \. unexpected pos",
        explain_full,
    ),
    Signature(
        "LoRA weights are empty",
        r"size mismatch for (?P<tensor>\S*lora_\S+): copying a param with shape torch\.Size\(\[0\]\) from checkpoint"
        r"|BrokenWeightsError: (?:tensor (?P<broken>\S*lora_\S+) has shape \(0,\)|every lora_B matrix is zero)",
        "LoRA weights {tensor}{broken} were saved empty or untrained. Under ZeRO-3 a process holds only its part "
        "of each weight, and saving without gathering the parts writes nothing",
        "do not use this adapter. This workflow gathers and checks weights before a checkpoint counts; delete the "
        "stage's `checkpoints` folder and run it again. An adapter from elsewhere must be saved again with "
        "gathered weights (`stage3_gather_16bit_weights_on_model_save: true`)",
    ),
    Signature(
        "The loss is not a number",
        r"\bloss'?:? ?'?(?P<value>nan|inf)\b|BrokenWeightsError: tensor \S+ holds values that are not finite"
        r"|\btraining diverged by step \d+: |Current loss scale already at minimum - cannot decrease scale anymore",
        "training diverged; the loss or the weights became infinite or not a number",
        "lower learning_rate (to a third), keep max_grad_norm at 1.0, use precision: bf16 (never fp16), and "
        "inspect the rows of the step before. Delete the stage's `checkpoints` folder if the damage is older than "
        "the last checkpoint",
        symptom=True,
    ),
    Signature(
        "The file system is read-only",
        build_error_pattern(30, "Read-only file system"),
        "{file} could not be written, because its file system is read-only",
        "`findmnt -T <folder>` shows how a folder is mounted. Allow writing (in a container: no `:ro` after the "
        "mount), or make `results` a link to a folder on another disk. A disk that was writable before is faulty: "
        f"`sudo dmesg | grep -i remount`; {RERUN_REMEDY}",
    ),
    Signature(
        "A file is too large",
        build_error_pattern(27, "File too large"),
        "{file} exceeded the largest size that the shell or the file system allows",
        "`ulimit -f` shows the shell's limit, `ulimit -f unlimited` lifts it. FAT32 stores files of up to 4 GiB; "
        f"make `results` a link to a folder on another disk; {RERUN_REMEDY}",
    ),
    Signature(
        "Too many open files",
        build_error_pattern(24, "Too many open files")
        + r"|RuntimeError: Too many open files\. Communication with the workers|: Too many open files \(24\)"
        + r"|received 0 items of ancdata",
        "a process reached the limit of open files and connections",
        "`ulimit -n` shows the limit; raise it in the shell that starts Snakemake (`ulimit -n 65536`; containers: "
        f"`--ulimit nofile=65536`), or lower loader_workers; {RERUN_REMEDY}",
    ),
    Signature(
        "Permission denied",
        r"PermissionError: \[Errno (?:1|13)\] (?:Operation not permitted|Permission denied)(?:: '(?P<path>[^'\n]*)')?"
        r"|\bPermission denied \(os error 13\)|(?m:: Permission denied$)",
        "this user may not read or write {file}",
        "`namei -l <path>` shows owner and permissions of every folder on the path. Files that another user wrote "
        f"(root, in a container) need `sudo chown -R $USER results`; {RERUN_REMEDY}",
    ),
    Signature(
        "A disk has a fault",
        build_error_pattern(5, "Input/output error"),
        "the system could not read or write {file}, because the disk, its cable or the network failed",
        "`sudo dmesg | grep -iE 'i/o error|nfs'` names the device. Copy the readable files to another disk and "
        f"make `results` a link to it (a damaged checkpoint is detected and renamed); {RERUN_REMEDY}",
    ),
    Signature(
        "Stale file handle",
        build_error_pattern(116, "Stale file handle"),
        "{file} is on a network file system; another machine replaced or removed it while it was open, or the "
        "server was restarted",
        "check that nothing else writes into the folder (only one Snakemake, no sync tool); mount it again if "
        f"`ls` fails there; {RERUN_REMEDY}",
    ),
    Signature(
        "Main memory is used up",
        r"^(?:\[rank\d+\]: )?(?:[\w.]+\._Array)?MemoryError\b|DefaultCPUAllocator: can't allocate memory"
        r"|\[Errno 12\] Cannot allocate memory|\bstd::bad_alloc\b|Cannot allocate memory \(os error 12\)",
        explain_memory,
    ),
    Signature(
        "No more threads or processes",
        r"RuntimeError: can't start new thread|BlockingIOError: \[Errno 11\] Resource temporarily unavailable"
        r"|pthread_create failed for thread|libgomp: Thread creation failed",
        "the system refused to start another thread or process; this user or container reached its limit, or "
        "memory ran out",
        "`ulimit -u` shows the user's limit, `cat /sys/fs/cgroup/pids.max` the container's (`--pids-limit`). "
        f"Raise it, end other programs, or lower loader_workers and --cores; {RERUN_REMEDY}",
    ),
    Signature(
        "A worker process ended abruptly",
        r"BrokenProcessPool: A (?:child process terminated|process in the process pool was terminated) abruptly"
        r"|DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
        explain_worker,
        symptom=True,
    ),
)
