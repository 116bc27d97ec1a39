"""Probe of the NVIDIA driver, its GPUs and their processes, through its library (NVML); end of orphaned processes."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
GRACE_S = 10  # between the two signals to an orphaned process


@dataclass(frozen=True)
class Gpu:
    """GPU and its memory."""

    index: int
    name: str
    total: int  # bytes
    free: int


@dataclass(frozen=True)
class GpuProcess:
    """Process on a GPU; `command` is empty and `mine` False if it is not visible, as from inside a container."""

    gpu: int
    pid: int
    memory_bytes: int | None  # bytes of GPU memory; None: the driver does not report it
    command: str
    mine: bool
    orphan: bool  # its parent has ended


@dataclass(frozen=True)
class DriverProbe:
    """NVIDIA driver, its GPUs and their processes."""

    cards: int  # number of NVIDIA cards, with or without a driver
    error: str | None = None  # why the driver did not answer
    version: str = ""
    cuda: str = ""  # newest CUDA version that the driver supports, as "12.4"
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()


def probe_driver() -> DriverProbe:
    """Ask the driver by NVML; an error of NVML is stored in the result instead of raised."""
    cards = count_cards()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DriverProbe(cards, error=str(error))
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return DriverProbe(
            cards,
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_describe_gpu(index, handle) for index, handle in enumerate(handles)),
            processes=tuple(
                process for index, handle in enumerate(handles) for process in _list_processes(index, handle)
            ),
        )
    except pynvml.NVMLError as error:
        return DriverProbe(cards, error=str(error))
    finally:
        pynvml.nvmlShutdown()


def count_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    cards = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        cards += vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES)
    return cards


def describe_process(gpu: int, pid: int, memory_bytes: int | None) -> GpuProcess:
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        orphan = parent is None or parent.pid == 1 or parent.name() == "systemd"
        return GpuProcess(
            gpu, pid, memory_bytes, " ".join(process.cmdline()), process.uids().real == os.getuid(), orphan
        )
    except psutil.Error:
        return GpuProcess(gpu, pid, memory_bytes, "", False, False)


def end_orphans(processes: tuple[GpuProcess, ...]) -> list[int]:
    """Terminate the user's own orphans, kill them after GRACE_S seconds, and return the process ids."""
    ended = []
    for pid in {process.pid for process in processes if process.mine and process.orphan}:
        try:
            process = psutil.Process(pid)
            process.terminate()
            ended.append(process)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(ended, timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return sorted(process.pid for process in ended)


def _describe_gpu(index: int, handle) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(index, pynvml.nvmlDeviceGetName(handle), memory.total, memory.free)


def _list_processes(index: int, handle) -> list[GpuProcess]:
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [describe_process(index, process.pid, process.usedGpuMemory) for process in running]
