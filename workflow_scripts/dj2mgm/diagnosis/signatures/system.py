"""Limits and faults of the operating system: files that cannot be opened or written, memory, processes, threads."""

from collections.abc import Callable

from dj2mgm.diagnosis.signature import Evidence, Explanation, Signature, fixed_explanation
from dj2mgm.diagnosis.signatures.signals import LESS, LOOK, describe_kill, kills_near
from dj2mgm.memory.cgroups import read_limits, total_memory
from dj2mgm.memory.memory_csv import gib

AGAIN = "then run the same command again: a stage goes on from what it has saved"


def message_of(number: int, words: str) -> str:
    """Return a pattern of the system's error as Python prints it, as libraries in Rust do, and as shells do."""
    return rf"\[Errno {number}\] {words}(?:: '(?P<path>[^'\n]*)')?|\b{words} \(os error {number}\)|(?m:: {words}$)"


def about_file(cause: str, remedy: str) -> Callable[[Evidence], Explanation]:
    """Return an explanation of which `{file}` stands for the file, as far as the message names it."""

    def explain(evidence: Evidence) -> Explanation:
        path = evidence.match["path"]
        return Explanation(cause.format(file=f"{path}" if path else "a file"), f"{remedy}; {AGAIN}")

    return explain


def explain_memory(evidence: Evidence) -> Explanation:
    limits, total = read_limits(), total_memory()
    there = f"this machine has {gib(total)}"
    if limits.memory and limits.memory < total:
        there += f", of which this job may use {gib(limits.memory)}"
    return Explanation(
        f"a process asked for more main memory than it could get; {there}. A limit of the shell (`ulimit -v`) looks "
        "the same",
        LESS,
    )


def explain_worker(evidence: Evidence) -> Explanation:
    """Explain a worker that the kernel killed as that; of another end, only the worker itself knows the cause."""
    if kills := kills_near(evidence.log):
        return describe_kill(kills, read_limits(), total_memory())
    return Explanation(
        "a worker process ended before it had returned its result, without a word here. Mostly the kernel ends one for "
        "want of memory; a library that crashes does it, too",
        f"look with `{LOOK}`. If it was memory: {LESS}",
    )


SIGNATURES = (
    Signature(
        "The file system is read-only",
        message_of(30, "Read-only file system"),
        about_file(
            "{file} could not be written: its file system can only be read",
            "`findmnt -T <folder>` shows how a folder is mounted. Allow writing (in a container: no `:ro` behind the "
            "mount), or make `results` a link to a folder on another disk. A disk that could be written before has a "
            "fault: `sudo dmesg | grep -i remount`",
        ),
    ),
    Signature(
        "A file is too large",
        message_of(27, "File too large"),
        about_file(
            "{file} grew beyond what the shell or the file system allows",
            "`ulimit -f` shows the shell's limit, `ulimit -f unlimited` lifts it. FAT32 holds files of up to 4 GiB: "
            "make `results` a link to a folder on another disk",
        ),
    ),
    Signature(
        "Too many open files",
        message_of(24, "Too many open files")
        + r"|RuntimeError: Too many open files\. Communication with the workers|: Too many open files \(24\)"
        + r"|received 0 items of ancdata",
        about_file(
            "a process held as many files and connections open as it may",
            "`ulimit -n` shows the limit; raise it in the shell that starts Snakemake (`ulimit -n 65536`; containers: "
            "`--ulimit nofile=65536`), or lower loader_workers",
        ),
    ),
    Signature(
        "Permission denied",
        r"PermissionError: \[Errno (?:1|13)\] (?:Operation not permitted|Permission denied)(?:: '(?P<path>[^'\n]*)')?"
        r"|\bPermission denied \(os error 13\)|(?m:: Permission denied$)",
        about_file(
            "this user may not read or write {file}",
            "`namei -l <path>` shows the owners and rights of every folder on the way to it. Files of an earlier run "
            "as another user (root, in a container) need `sudo chown -R $USER results`",
        ),
    ),
    Signature(
        "A disk has a fault",
        message_of(5, "Input/output error"),
        about_file(
            "the system could not read or write {file}: the disk, its cable, or the network on the way to it failed",
            "`sudo dmesg | grep -iE 'i/o error|nfs'` names the device. Copy what can be read to another disk and make "
            "`results` a link to it (a damaged checkpoint is noticed and set aside)",
        ),
    ),
    Signature(
        "Stale file handle",
        message_of(116, "Stale file handle"),
        about_file(
            "{file}, on a network file system, was replaced or removed by another machine while it was open, or the "
            "server was restarted",
            "check that nothing else writes into the folder (one Snakemake at a time, no sync tool); mount it again if "
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
        fixed_explanation(
            "the system refused to start another thread or process: this user or this container has as many as it may, "
            "or there is no memory for another one",
            "`ulimit -u` shows the user's limit, `cat /sys/fs/cgroup/pids.max` the container's (`--pids-limit`). Raise "
            f"it, end other programs, or lower loader_workers and --cores; {AGAIN}",
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
