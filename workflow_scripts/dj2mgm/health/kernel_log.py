"""Processes that the kernel's out-of-memory killer ended, from the kernel log, if permissions allow reading it."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

KILL_MESSAGE = re.compile(
    r"(?P<cgroup>Memory cgroup out of memory)?.*\bKilled process (?P<pid>\d+) \((?P<name>[^)]*)\),?"
    r".*?anon-rss:(?P<anonymous>\d+)kB(?:.*?shmem-rss:(?P<shared>\d+)kB)?"
)
KERNEL_RECORD = re.compile(r"\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<message>[^\n]*)")


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
