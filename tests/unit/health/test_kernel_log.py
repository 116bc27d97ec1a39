"""Kills in the kernel log: process, time and memory."""

from pathlib import Path

import pytest

from dj2mgm.health.kernel_log import parse_kernel_log, read_kernel_kills

GIB = 2**30

KERNEL_LOG = """\
6,1380,61234567,-;Call Trace:
 SUBSYSTEM=memory
4,1381,62000000,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=13266,uid=1000
3,1382,62000100,-;Out of memory: Killed process 13266 (python) total-vm:98304000kB, anon-rss:62914560kB, \
file-rss:2048kB, shmem-rss:1048576kB, UID:1000 pgtables:129000kB oom_score_adj:0
3,1383,63000000,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:9830400kB, anon-rss:8388608kB, \
file-rss:0kB, shmem-rss:0kB, UID:0
"""


def test_kernel_records_give_process_time_and_memory():
    full, limited = parse_kernel_log(KERNEL_LOG, booted=1000.0)
    assert (full.pid, full.name, full.memory_bytes, full.by_limit) == (13266, "python", 61 * GIB, False)
    assert full.time == pytest.approx(1062.0001)
    assert (limited.pid, limited.memory_bytes, limited.by_limit) == (77, 8 * GIB, True)


def test_kernel_log_of_this_machine():
    kills = read_kernel_kills()
    assert kills is None or all(kill.pid > 0 for kill in kills)
    assert read_kernel_kills(Path("/nowhere")) is None
