"""One look at memory: GPUs, machine, control group, a tree of processes; and what a series of readings says."""

import os
from dataclasses import dataclass
from functools import cache

import numpy as np
import psutil

from dj2mgm.memory.cgroups import CgroupMemory, read_cgroup_memory

# Memory of the GPUs that this process may use, as the driver counts it (NVML): all processes, CUDA contexts too.

try:
    import pynvml
except ImportError:  # optional: without it, as without a driver, there are no GPUs to see
    pynvml = None


@dataclass(frozen=True)
class GpuMemory:
    index: int  # as CUDA counts the visible ones
    used: int  # bytes
    total: int


def read_gpu_memory() -> list[GpuMemory]:
    """Empty without a driver, or where it does not answer."""
    devices = _devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        memory = [pynvml.nvmlDeviceGetMemoryInfo(device) for device in devices]
    except pynvml.NVMLError:
        return []
    return [GpuMemory(index, one.used, one.total) for index, one in enumerate(memory)]


@cache
def _devices(visible: str | None) -> list:
    """NVML's handles; `visible` lists numbers or UUIDs, None means all."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
        names = range(pynvml.nvmlDeviceGetCount()) if visible is None else filter(None, visible.split(","))
        return [_device(str(name).strip()) for name in names]
    except pynvml.NVMLError:
        return []


def _device(name: str):
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)


# One look at memory: GPUs, machine, control group, and a tree of processes.

GIB = 2**30


@dataclass(frozen=True)
class Reading:
    """Bytes in use."""

    job: int  # the process tree
    host: int  # the machine, without what the kernel can free at once
    host_total: int
    cgroup: CgroupMemory | None  # None: no limit is set
    gpus: list[GpuMemory]

    @property
    def host_limit(self) -> int:
        """Bytes that the job may use before something is killed."""
        return min(self.host_total, self.cgroup.limit) if self.cgroup else self.host_total

    @property
    def host_share(self) -> float:
        """How full the machine or the control group is, whichever is fuller."""
        machine = self.host / self.host_total
        return max(machine, self.cgroup.used / self.cgroup.limit) if self.cgroup else machine

    def columns(self) -> dict[str, float | None]:
        """In GiB, under the names that memory.csv has; no GPU, no column of it."""
        cgroup = self.cgroup.used if self.cgroup else None
        sizes = {"job_gib": self.job, "host_gib": self.host, "cgroup_gib": cgroup}
        sizes |= {f"gpu{gpu.index}_gib": gpu.used for gpu in self.gpus}
        return {name: None if size is None else round(size / GIB, 3) for name, size in sizes.items()}


def read_memory(root: psutil.Process) -> Reading:
    machine = psutil.virtual_memory()
    return Reading(
        job=tree_memory(root),
        host=machine.total - machine.available,
        host_total=machine.total,
        cgroup=read_cgroup_memory(),
        gpus=read_gpu_memory(),
    )


def tree_memory(root: psutil.Process) -> int:
    """Bytes that a process and all below it hold.

    The sum of proportional set sizes, in which a page that n processes share counts 1/n in each: a sum of resident
    sizes would count the model again for every loader worker that was forked from the trainer.
    """
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(_proportional_set_size, processes))


def _proportional_set_size(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:  # somebody else's: only its resident size is known
        return process.memory_info().rss


LEAK_SHARE = 0.02  # of the mean: growth over the second half that counts, if it also stands out of the noise
NOISE = 3.0  # standard deviations of the values around the line


@dataclass(frozen=True)
class Summary:
    """One column of readings, in GiB."""

    mean: float
    peak: float
    peak_seconds: float  # when it was reached, after the start
    slope_per_hour: float  # of a straight line through the second half, when loading is over
    grows: bool  # more than noise explains: a leak, if the work is the same all the time


def summarize(seconds: list[float], values: list[float]) -> Summary:
    """
    Args:
        seconds: (N,) times of the readings, N ≥ 1.
        values: (N,) GiB.
    """
    times, sizes = np.array(seconds, dtype=float), np.array(values, dtype=float)
    peak = int(sizes.argmax())
    slope, grows = _growth(times[len(times) // 2 :], sizes[len(sizes) // 2 :])
    return Summary(float(sizes.mean()), float(sizes[peak]), float(times[peak]), 3600 * slope, grows)


def _growth(times: np.ndarray, sizes: np.ndarray) -> tuple[float, bool]:
    """GiB a second of the least-squares line, and whether it rises by more than noise."""
    if len(times) < 4 or times[0] == times[-1]:
        return 0.0, False
    slope, start = np.polyfit(times - times[0], sizes, 1)
    noise = float(np.std(sizes - (slope * (times - times[0]) + start)))
    growth = slope * (times[-1] - times[0])
    return float(slope), bool(growth > max(NOISE * noise, LEAK_SHARE * sizes.mean()))
