"""Memory readings: control groups of both versions (from files), real processes, and GPUs of a fake driver."""

import multiprocessing
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from dj2mgm.monitoring.memory_files import GIB, CgroupLimits, CgroupMemory, read_cgroup_limits, read_cgroup_memory
from dj2mgm.monitoring.readings import Reading, _open_devices, read_gpu_memory, read_memory, read_tree_memory

MIB = 2**20


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


def write_group(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(folder / name, text)


def test_version_2_reads_the_group_with_the_least_free_memory(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/slurm/job/step\n")
    roomy = {"memory.max": "9000", "memory.current": "1000", "memory.stat": "inactive_file 0\n"}
    narrow = {"memory.max": "4000", "memory.current": "3500", "memory.stat": "anon 9\ninactive_file 500\n"}
    write_group(root / "slurm/job/step", {"memory.max": "max", "memory.current": "100", "memory.stat": ""})
    write_group(root / "slurm/job", narrow)
    write_group(root / "slurm", roomy)
    assert read_cgroup_memory(proc, root) == CgroupMemory(3000, 4000)


def test_version_1_reads_the_hierarchy_and_the_mount(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n")
    files = {"memory.limit_in_bytes": "4000\n", "memory.usage_in_bytes": "3500\n"}
    write_group(root / "memory", files | {"memory.stat": "inactive_file 1\ntotal_inactive_file 700\n"})
    assert read_cgroup_memory(proc, root) == CgroupMemory(2800, 4000)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_there_is_no_reading_without_a_limit(tmp_path, limit):
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/\n0::/\n")
    for folder in (tmp_path / "fs", tmp_path / "fs/memory"):
        write_group(folder, {"memory.max": limit, "memory.limit_in_bytes": limit, "memory.usage_in_bytes": "1"})
    assert read_cgroup_memory(proc, tmp_path / "fs") is None
    assert read_cgroup_memory(tmp_path / "nowhere", tmp_path) is None


SHARE_MEMORY = """
import mmap, os, sys
shared = mmap.mmap(-1, 200 << 20)
shared.write(os.urandom(1 << 20) * 200)
for _ in range(3):
    if not os.fork():
        sum(shared[:: mmap.PAGESIZE])
        break
os.write(1, b"ready\\n")
sys.stdin.read()
"""


def test_memory_shared_by_processes_is_counted_once():
    parent = subprocess.Popen([sys.executable, "-c", SHARE_MEMORY], stdin=PIPE, stdout=PIPE, text=True)
    with parent:  # closes stdin, which ends all four processes
        assert [parent.stdout.readline() for _ in range(4)] == ["ready\n"] * 4
        process = psutil.Process(parent.pid)
        resident = sum(child.memory_info().rss for child in process.children())
        assert 200 * MIB <= read_tree_memory(process) < 300 * MIB
    assert resident > 600 * MIB, "a sum of resident sizes counts it again"


def test_an_ended_process_has_no_memory():
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    ended = psutil.Process(process.pid)
    process.join()
    assert read_tree_memory(ended) == 0


def test_this_machine_can_be_read():
    reading = read_memory(psutil.Process())
    assert 0 < reading.job < reading.host < reading.host_total
    assert reading.host_limit <= reading.host_total and 0 < reading.host_share < 1
    assert reading.build_row()["job_gib"] == pytest.approx(reading.job / GIB, abs=1e-3)


def test_the_smaller_free_memory_of_machine_and_group_counts():
    reading = Reading(job=1, host=50, host_total=100, cgroup=CgroupMemory(9, 10), gpus=[])
    assert (reading.host_share, reading.host_limit) == (0.9, 10)
    assert Reading(job=1, host=50, host_total=100, cgroup=None, gpus=[]).host_share == 0.5


class FakeDriver:
    """Three GPUs with the interface of NVML."""

    class NVMLError(Exception):
        pass

    class Memory:
        def __init__(self, used):
            self.used, self.total = used, 100

    used = {"0": 10, "1": 20, "GPU-c": 30}

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        if name not in self.used:
            raise self.NVMLError("not found")
        return name

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return self.Memory(self.used[device])


@pytest.mark.parametrize(
    ("visible", "used"), [(None, [10, 20]), ("1", [20]), ("1,0", [20, 10]), ("GPU-c", [30]), ("", []), ("GPU-x", [])]
)
def test_visible_gpus_are_read_in_the_order_of_cuda(monkeypatch, visible, used):
    monkeypatch.setattr("dj2mgm.monitoring.readings.pynvml", FakeDriver())
    _open_devices.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    readings = read_gpu_memory()
    _open_devices.cache_clear()
    assert [(gpu.index, gpu.used) for gpu in readings] == list(enumerate(used))


def test_without_the_package_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr("dj2mgm.monitoring.readings.pynvml", None)
    _open_devices.cache_clear()
    assert read_gpu_memory() == []
    _open_devices.cache_clear()
