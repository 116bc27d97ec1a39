"""A GPU's memory while a stage is trained: how much of it tensors may take, and whether it ran out."""

import torch

from dj2mgm.memory.prediction import NCCL_AND_KERNELS

# What CUDA's libraries say who allocate beside PyTorch.
FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Cuda failure 'out of")


def leave_room_for_kernels() -> None:
    """Keep PyTorch from taking the GPU's last memory for blocks that it holds for later: cuBLAS, NCCL and kernels that
    are loaded in mid-run ask the driver, and end with its error where nothing is left."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        tensors = max(0, free - NCCL_AND_KERNELS)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + tensors) / total)


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(sentence in str(error) for sentence in FULL)
