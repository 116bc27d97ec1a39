"""Processor and random-number settings that every script with a model in it shares."""

import os
import random

import numpy
import torch


def use_cpu_threads(count: int | None) -> int:
    """Let PyTorch use `count` threads; None means every core this process may run on.

    Snakemake sets OMP_NUM_THREADS to a rule's `threads`, which `--cores 1` ("one job at a time") scales down to 1. The
    cores a job may use are what its scheduler's affinity mask says, so that is the default.
    """
    count = count or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)
    return count


def set_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 autocast where the processor computes in bf16, otherwise float32 as written."""
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bool(fast))
