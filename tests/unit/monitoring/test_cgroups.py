"""Limits of control groups, from files of both versions."""

from pathlib import Path

from dj2mgm.monitoring.memory_files import CgroupLimits, read_cgroup_limits

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_cgroups_v2_are_the_narrowest_of_all_parents(tmp_path):
    write(tmp_path / "proc", "0::/jobs/one\n")
    write(tmp_path / "jobs/memory.max", f"{8 * GIB}\n")
    write(tmp_path / "jobs/one/memory.max", "max\n")
    write(tmp_path / "jobs/one/cpu.max", "150000 100000\n")
    write(tmp_path / "jobs/one/memory.events", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    assert read_cgroup_limits(tmp_path / "proc", tmp_path) == CgroupLimits(8 * GIB, 1.5, 1)


def test_limits_of_cgroups_v1_in_a_container(tmp_path):
    write(tmp_path / "proc", "4:memory:/docker/0123\n1:cpu:/docker/0123\n0::/\n")
    write(tmp_path / "memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(tmp_path / "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    assert read_cgroup_limits(tmp_path / "proc", tmp_path) == CgroupLimits(4 * GIB, 2.0, 3)


def test_unlimited_control_groups(tmp_path):
    write(tmp_path / "proc", "4:memory:/\n1:cpu:/\n0::/\n")
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory.max", "max\n")
    assert read_cgroup_limits(tmp_path / "proc", tmp_path) == CgroupLimits(None, None, None)
