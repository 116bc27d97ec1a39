"""Memory of the GPUs that this process may use, as the driver counts it (NVML): all processes, CUDA contexts too."""

import os
from dataclasses import dataclass
from functools import cache

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
