"""Killed processes in the kernel log, and explanations by it, limits and memory readings."""

from pathlib import Path

import pytest

from dj2mgm.health.diagnosis import find_cause
from dj2mgm.health.failure_signature import read_log
from dj2mgm.health.system_failures import OomKill, describe_kill, parse_kernel_log, read_kernel_kills
from dj2mgm.monitoring.memory_files import CgroupLimits
from paths import PROJECT

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


def test_kill_is_explained_with_held_and_total_memory():
    full = OomKill(13266, "python", 61 * GIB, by_limit=False, time=62.0)
    limited = OomKill(77, "python", 8 * GIB, by_limit=True, time=63.0)
    no_limit = CgroupLimits(None, None, None)
    cause = describe_kill([full], no_limit, 64 * GIB).cause
    assert "machine's memory was full" in cause
    assert "process 13266 (python), which held 61.0 GiB; this machine has 64.0 GiB" in cause
    cause = describe_kill([limited], CgroupLimits(8 * GIB, None, 1), 64 * GIB).cause
    assert "job's memory limit was reached" in cause and "may use 8.0 GiB" in cause
    cause = describe_kill(None, CgroupLimits(8 * GIB, None, 2), 64 * GIB).cause
    assert "memory limit of 8.0 GiB was reached; it has ended 2 process(es)" in cause


def test_kill_is_shown_with_last_memory_reading(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    rows = "attempt,time,seconds,phase,job_gib,host_gib\n1,2026-03-02T10:16:20,38.0,loading,61.2,63.1\n1,2026-03"
    (tmp_path / "checkpoints/memory.csv").write_text(rows)
    log = PROJECT / "tests/fixtures/logs/killed-with-signal-9.log"
    (tmp_path / "finetune.log").write_text(log.read_text(encoding="utf-8"))
    cause = find_cause(read_log(tmp_path / "finetune.log")).explanation.cause
    assert "(phase loading) the job held 61.2 GiB and the whole machine 63.1 GiB" in cause


def test_kill_without_records_is_not_attributed_to_memory():
    for kills, reason in ((None, "may not be read"), ([], "holds no record")):
        explanation = describe_kill(kills, CgroupLimits(None, None, None), 64 * GIB)
        assert reason in explanation.cause and "was full" not in explanation.cause
        assert "dmesg" in explanation.remedy
