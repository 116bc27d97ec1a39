"""Explanations of killed processes by the kernel log, limits and memory readings."""

from dj2mgm.health.diagnosis import find_cause
from dj2mgm.health.kernel_log import OomKill
from dj2mgm.health.kill_failures import describe_kill
from dj2mgm.health.log_text import read_log
from dj2mgm.monitoring.cgroups import CgroupLimits
from paths import PROJECT

GIB = 2**30


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
