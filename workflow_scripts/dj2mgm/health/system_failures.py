"""Failures by limits and faults of the system: files, main memory, threads and worker processes."""

from collections.abc import Callable

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature, make_fixed_explanation
from dj2mgm.health.kill_failures import (
    KERNEL_LOG_COMMAND,
    REDUCE_HOST_MEMORY_REMEDY,
    describe_kill,
    describe_memory,
    find_kills,
)
from dj2mgm.monitoring.cgroups import read_cgroup_limits, read_total_memory

RERUN_REMEDY = "then run the same command again; a stage continues from its saved state"


def build_error_pattern(number: int, message: str) -> str:
    """Return a pattern of the system's error as Python, Rust libraries and shells print it."""
    return (
        rf"\[Errno {number}\] {message}(?:: '(?P<path>[^'\n]*)')?|\b{message} \(os error {number}\)|(?m:: {message}$)"
    )


def explain_file(cause: str, remedy: str) -> Callable[[Evidence], Explanation]:
    """Return a function that fills the file of the message into `cause`."""

    def explain(evidence: Evidence) -> Explanation:
        path = evidence.match["path"]
        return Explanation(cause.format(file=f"{path}" if path else "a file"), f"{remedy}; {RERUN_REMEDY}")

    return explain


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
        "The file system is read-only",
        build_error_pattern(30, "Read-only file system"),
        explain_file(
            "{file} could not be written, because its file system is read-only",
            "`findmnt -T <folder>` shows how a folder is mounted. Allow writing (in a container: no `:ro` after the "
            "mount), or make `results` a link to a folder on another disk. A disk that was writable before is faulty: "
            "`sudo dmesg | grep -i remount`",
        ),
    ),
    Signature(
        "A file is too large",
        build_error_pattern(27, "File too large"),
        explain_file(
            "{file} exceeded the largest size that the shell or the file system allows",
            "`ulimit -f` shows the shell's limit, `ulimit -f unlimited` lifts it. FAT32 stores files of up to 4 GiB; "
            "make `results` a link to a folder on another disk",
        ),
    ),
    Signature(
        "Too many open files",
        build_error_pattern(24, "Too many open files")
        + r"|RuntimeError: Too many open files\. Communication with the workers|: Too many open files \(24\)"
        + r"|received 0 items of ancdata",
        explain_file(
            "a process reached the limit of open files and connections",
            "`ulimit -n` shows the limit; raise it in the shell that starts Snakemake (`ulimit -n 65536`; containers: "
            "`--ulimit nofile=65536`), or lower loader_workers",
        ),
    ),
    Signature(
        "Permission denied",
        r"PermissionError: \[Errno (?:1|13)\] (?:Operation not permitted|Permission denied)(?:: '(?P<path>[^'\n]*)')?"
        r"|\bPermission denied \(os error 13\)|(?m:: Permission denied$)",
        explain_file(
            "this user may not read or write {file}",
            "`namei -l <path>` shows owner and permissions of every folder on the path. Files that another user wrote "
            "(root, in a container) need `sudo chown -R $USER results`",
        ),
    ),
    Signature(
        "A disk has a fault",
        build_error_pattern(5, "Input/output error"),
        explain_file(
            "the system could not read or write {file}, because the disk, its cable or the network failed",
            "`sudo dmesg | grep -iE 'i/o error|nfs'` names the device. Copy the readable files to another disk and "
            "make `results` a link to it (a damaged checkpoint is detected and renamed)",
        ),
    ),
    Signature(
        "Stale file handle",
        build_error_pattern(116, "Stale file handle"),
        explain_file(
            "{file} is on a network file system; another machine replaced or removed it while it was open, or the "
            "server was restarted",
            "check that nothing else writes into the folder (only one Snakemake, no sync tool); mount it again if "
            "`ls` fails there",
        ),
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
        make_fixed_explanation(
            "the system refused to start another thread or process; this user or container reached its limit, or "
            "memory ran out",
            "`ulimit -u` shows the user's limit, `cat /sys/fs/cgroup/pids.max` the container's (`--pids-limit`). "
            f"Raise it, end other programs, or lower loader_workers and --cores; {RERUN_REMEDY}",
        ),
    ),
    Signature(
        "A worker process ended abruptly",
        r"BrokenProcessPool: A (?:child process terminated|process in the process pool was terminated) abruptly"
        r"|DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
        explain_worker,
        symptom=True,
    ),
)
