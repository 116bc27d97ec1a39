"""GPU memory during training: a reserve for kernels, and recognition of a full GPU."""

import torch

from dj2mgm.planning.prediction import NCCL_AND_KERNELS

# Messages of CUDA libraries that allocate memory outside of PyTorch.
MESSAGES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Cuda failure 'out of",
)


def reserve_memory_for_kernels() -> None:
    """Keep PyTorch from reserving the GPU's last memory for its cache.

    cuBLAS, NCCL and kernels that are loaded during the run allocate from the driver, and fail if nothing is left.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        tensors = max(0, free - NCCL_AND_KERNELS)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + tensors) / total)


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in MESSAGES)
