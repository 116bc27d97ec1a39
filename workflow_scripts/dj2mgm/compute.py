"""Threads, seeds, devices and precision of scripts with a model."""

import ctypes
import os
import random

import numpy
import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt (malloc.h)


def use_cpu_threads(count: int | None) -> int:
    """Set the number of PyTorch's threads; None: all cores available to this process.

    Snakemake sets OMP_NUM_THREADS to a rule's `threads`, which `--cores 1` ("one job at a time") reduces to 1. The
    scheduler's affinity mask gives the cores of a job, so it is the default.
    """
    if not torch.cuda.is_available():
        keep_freed_memory()
    count = count or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)
    return count


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensors.

    By default glibc returns blocks of 32 MiB to the kernel, which clears them again for each layer of each step. That
    took a seventh of the tiny model's steps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries than glibc have none
    if mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def use_own_gpu() -> None:
    """Select this process's GPU for all code that does not name one.

    Must be called before anything else of CUDA, because the first use of a GPU makes a context of half a GiB there, and
    the default is the first GPU for all processes.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def set_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def select_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return an autocast to bf16 if the processor computes in bf16; otherwise it stays in float32."""
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bool(fast))
