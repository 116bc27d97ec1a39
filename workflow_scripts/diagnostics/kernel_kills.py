"""Which processes the kernel's out-of-memory killer has ended, from the kernel's own log, where that may be read."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

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
