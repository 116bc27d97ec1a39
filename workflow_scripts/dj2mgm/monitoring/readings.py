"""Readings of memory: GPUs, machine, control groups, a process tree; their summaries; and a sampler for trainings.

The sampler is a thread of a training stage that appends rows to memory.csv in the folder of the resume checkpoints,
which outlives a failed attempt. The declared memory.csv is copied from it last.
"""

import csv
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np
import psutil

from dj2mgm.cli import messages
from dj2mgm.monitoring.memory_files import (
    GIB,
    LEADING_COLUMNS,
    CgroupMemory,
    read_cgroup_memory,
    read_columns,
    start_file,
)
from dj2mgm.storage.files import write_text

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


INTERVAL_S = 1.0
PAUSE_FACTOR = 200  # the pause after a reading is 200 times as long, so that sampling takes well below 1 % of the time
GPU_WARNING, HOST_WARNING = 0.8, 0.7  # shares in use


def find_job_process() -> psutil.Process:
    """Return this process if it trains alone, else the launcher that started the processes of this node."""
    return psutil.Process(os.getppid() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None)


class MemorySampler:
    """Thread that samples memory from `start` to `finish`, in the first process of each node, into `file`.

    `phase` is the value of the next rows' column `phase`. A resumed run keeps the rows of the file.
    """

    def __init__(self, file: Path, resumed: bool):
        self.phase = "loading"
        self.sampling = int(os.environ.get("LOCAL_RANK", 0)) == 0
        first_node = int(os.environ.get("RANK", 0)) == 0
        self.file = file if first_node else file.with_stem(f"{file.stem}-{socket.gethostname()}")
        self.resumed = resumed
        self.last: Reading | None = None
        self._reading_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory sampler", daemon=True)

    def start(self) -> None:
        self._start = time.monotonic()
        if self.sampling:
            self._thread.start()

    def finish(self, folder: Path) -> dict | None:
        """Stop and copy the rows into `folder`; return a record for metrics.json, None if nothing was sampled here."""
        if not self.sampling:
            return None
        self._stop.set()
        self._thread.join()
        seconds = time.monotonic() - self._start
        write_text(folder / self.file.name, self.file.read_text(encoding="utf-8"))
        gpus = [gpu.total for gpu in self.last.gpus]
        return {
            "host_limit_gib": round(self.last.host_limit / GIB, 2),
            "gpu_limit_gib": round(min(gpus) / GIB, 2) if gpus else None,
            "sampler_share": round(self._reading_seconds / seconds, 5),
        }

    def _sample(self) -> None:
        """Write readings until `finish` is called, and one at the end; reading takes a limited share of the time."""
        process = find_job_process()
        columns = [*LEADING_COLUMNS, *read_memory(process).build_row()]
        attempt = start_file(self.file, columns, self.resumed)
        warned_names: set[str] = set()
        with open(self.file, "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, read_columns(self.file), lineterminator="\n")
            is_last = False
            while not is_last:
                is_last = self._stop.is_set()  # if set during the pause, one more reading records the end
                start = time.monotonic()
                self.last = read_memory(process)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                leading = zip(LEADING_COLUMNS, (attempt, now, round(start - self._start, 2), self.phase), strict=True)
                writer.writerow(dict(leading) | self.last.build_row())
                file.flush()
                warn_if_full(self.last, warned_names)
                elapsed = time.monotonic() - start
                self._reading_seconds += elapsed
                self._stop.wait(max(INTERVAL_S, PAUSE_FACTOR * elapsed))


def warn_if_full(reading: Reading, warned_names: set[str]) -> None:
    """Warn once for each GPU, and once for the host, if its memory is nearly full; update `warned_names`."""
    for gpu in reading.gpus:
        if gpu.used > GPU_WARNING * gpu.total:
            _warn_once(
                warned_names,
                f"GPU {gpu.index}",
                f"{gpu.used / gpu.total:.0%} full ({gpu.used / GIB:.1f} of {gpu.total / GIB:.1f} GiB). A longer batch "
                "may not fit: lower micro_batch_size and raise gradient_accumulation_steps",
            )
    if reading.host_share > HOST_WARNING:
        _warn_once(
            warned_names,
            "host memory",
            f"{reading.host_share:.0%} full (limit {reading.host_limit / GIB:.1f} GiB, held by this job "
            f"{reading.job / GIB:.1f} GiB). When it is full, the kernel kills the job (exit code -9): lower "
            "loader_workers, or choose a DeepSpeed configuration that offloads less",
        )


def _warn_once(warned_names: set[str], name: str, state: str) -> None:
    if name not in warned_names:
        warned_names.add(name)
        messages.warn(f"{name} is {state}")
