"""What this machine has for a training stage: GPUs with their memory, and main memory; None for what cannot be read."""

import os

import psutil
import torch

from diagnostics.cgroup_memory import read_cgroup_memory
from planning.prediction import CUDA_CONTEXT, GIB, Machine


def whole_machine(gpus: int, nodes: int = 1) -> Machine:
    """What there would be if nothing else ran here, and on nodes like this one. Without a GPU, a machine of none."""
    total, cgroup = psutil.virtual_memory().total, read_cgroup_memory()
    host = min(total, cgroup.limit) if cgroup else total
    memory = [torch.cuda.get_device_properties(device).total_memory for device in _devices(gpus // nodes)]
    return _machine(gpus, nodes, memory, host)


def machine_in_use(gpus: int, nodes: int = 1) -> Machine:
    """What is free now: on the host what the kernel can give or what is left of the control group's limit, whichever is
    smaller."""
    free, cgroup = psutil.virtual_memory().available, read_cgroup_memory()
    host = min(free, cgroup.limit - cgroup.used) if cgroup else free
    # To ask a GPU makes a context there, for as long as this process lives: each of several asks its own only. That
    # context is a part of what a stage needs.
    own = os.environ.get("LOCAL_RANK")
    devices = _devices(gpus // nodes) if own is None or not torch.cuda.is_available() else [int(own)]
    memory = [torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT for device in devices]
    return _machine(gpus, nodes, memory, host)


def _devices(gpus: int) -> range:
    return range(min(gpus, torch.cuda.device_count()))


def _machine(gpus: int, nodes: int, gpu_memory: list[int], host: int) -> Machine:
    if not gpu_memory:
        return Machine(0, None, host / GIB)
    return Machine(gpus, min(gpu_memory) / GIB, host / GIB, nodes)
