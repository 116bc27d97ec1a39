"""What this machine has for a training stage: GPUs and their memory, and the memory that the host can still give."""

import psutil
import torch

from diagnostics.cgroup_memory import read_cgroup_memory
from planning.prediction import CUDA_CONTEXT, GIB, Machine


def this_machine(gpus: int) -> Machine:
    """`gpus` of this machine's GPUs, or the host alone where there are none."""
    if not torch.cuda.is_available():
        return Machine(0, None, available_host_memory() / GIB)
    free = min(torch.cuda.mem_get_info(device)[0] for device in range(min(gpus, torch.cuda.device_count())))
    # this process's own context is there already, and is a part of what a stage needs
    return Machine(gpus, (free + CUDA_CONTEXT) / GIB, available_host_memory() / GIB)


def available_host_memory() -> int:
    """Bytes: what the kernel can give, or what is left of the control group's limit, whichever is smaller."""
    available, cgroup = psutil.virtual_memory().available, read_cgroup_memory()
    return min(available, cgroup.limit - cgroup.used) if cgroup else available
