"""Readings of the memory that GPUs, machine, control group and a process tree use, and summaries of many readings."""

import os
from dataclasses import dataclass
from functools import cache

import numpy as np
import psutil

from dj2mgm.monitoring.cgroups import CgroupMemory, read_cgroup_memory
from dj2mgm.monitoring.memory_csv import GIB

try:
    import pynvml
except ImportError:  # optional: without it, or without a driver, no GPU is seen
    pynvml = None


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU in bytes as the driver (NVML) counts it: all processes, including CUDA contexts."""

    index: int  # CUDA's number among the visible GPUs
    used: int
    total: int


def read_gpu_memory() -> list[GpuMemory]:
    """Return the memory of the GPUs that this process may use; empty if there is no driver or it does not answer."""
    devices = _open_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        infos = [pynvml.nvmlDeviceGetMemoryInfo(device) for device in devices]
    except pynvml.NVMLError:
        return []
    return [GpuMemory(index, info.used, info.total) for index, info in enumerate(infos)]


@cache
def _open_devices(visible: str | None) -> list:
    """Return NVML's handles; `visible` lists numbers or UUIDs, None means all."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
        names = range(pynvml.nvmlDeviceGetCount()) if visible is None else filter(None, visible.split(","))
        return [_open_device(str(name).strip()) for name in names]
    except pynvml.NVMLError:
        return []


def _open_device(name: str):
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)


@dataclass(frozen=True)
class Reading:
    """Memory in use, in bytes."""

    job: int  # the process tree
    host: int  # the machine, without memory that the kernel can free at once
    host_total: int
    cgroup: CgroupMemory | None  # None: no limit is set
    gpus: list[GpuMemory]

    @property
    def host_limit(self) -> int:
        """Bytes that the job may use before the kernel kills a process."""
        return min(self.host_total, self.cgroup.limit) if self.cgroup else self.host_total

    @property
    def host_share(self) -> float:
        """Share in use of the machine or of the control group, whichever is greater."""
        machine = self.host / self.host_total
        return max(machine, self.cgroup.used / self.cgroup.limit) if self.cgroup else machine

    def build_row(self) -> dict[str, float | None]:
        """Return GiB by column name of memory.csv; None without a limit of a control group."""
        cgroup = self.cgroup.used if self.cgroup else None
        sizes = {"job_gib": self.job, "host_gib": self.host, "cgroup_gib": cgroup}
        sizes |= {f"gpu{gpu.index}_gib": gpu.used for gpu in self.gpus}
        return {name: None if size is None else round(size / GIB, 3) for name, size in sizes.items()}


def read_memory(root: psutil.Process) -> Reading:
    machine = psutil.virtual_memory()
    return Reading(
        job=read_tree_memory(root),
        host=machine.total - machine.available,
        host_total=machine.total,
        cgroup=read_cgroup_memory(),
        gpus=read_gpu_memory(),
    )


def read_tree_memory(root: psutil.Process) -> int:
    """Return the bytes held by a process and all of its descendants.

    It is the sum of proportional set sizes, in which a page shared by n processes counts 1/n in each. A sum of resident
    sizes would count the model again for every loader worker that was forked from the trainer.
    """
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(_read_proportional_set_size, processes))


def _read_proportional_set_size(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:  # a process of another user shows only its resident size
        return process.memory_info().rss


# Growth over the second half is a leak if it exceeds this share of the mean, and the noise.
LEAK_SHARE = 0.02
NOISE_FACTOR = 3.0  # standard deviations of the values around the line


@dataclass(frozen=True)
class Summary:
    """Summary of one column of readings, in GiB."""

    mean: float
    peak: float
    peak_seconds: float  # seconds from the start to the peak
    slope_per_hour: float  # slope of a line through the second half, when loading is over
    grows: bool  # whether growth exceeds the noise; it is then a leak, provided that the work stays the same


def summarize_readings(seconds: list[float], values: list[float]) -> Summary:
    """Summarize one column of N ≥ 1 readings: (N,) seconds and (N,) GiB."""
    times, sizes = np.array(seconds, dtype=float), np.array(values, dtype=float)
    peak = int(sizes.argmax())
    slope, grows = _fit_growth(times[len(times) // 2 :], sizes[len(sizes) // 2 :])
    return Summary(float(sizes.mean()), float(sizes[peak]), float(times[peak]), 3600 * slope, grows)


def _fit_growth(times: np.ndarray, sizes: np.ndarray) -> tuple[float, bool]:
    """Return the slope of the least-squares line in GiB per second, and whether it rises by more than noise."""
    if len(times) < 4 or times[0] == times[-1]:
        return 0.0, False
    slope, start = np.polyfit(times - times[0], sizes, 1)
    noise = float(np.std(sizes - (slope * (times - times[0]) + start)))
    growth = slope * (times[-1] - times[0])
    return float(slope), bool(growth > max(NOISE_FACTOR * noise, LEAK_SHARE * sizes.mean()))
