import os
import random
from pathlib import Path

import numpy
import torch

from compute import mixed_precision, set_seed, use_cpu_threads


def draw() -> tuple:
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_a_seed_fixes_all_three_generators():
    set_seed(3)
    first = draw()
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert not set(draw()) & set(first)


def test_threads_default_to_the_cores_the_process_may_use(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    try:
        assert use_cpu_threads(None) == len(os.sched_getaffinity(0)) == torch.get_num_threads()
        assert use_cpu_threads(1) == torch.get_num_threads() == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
    finally:
        torch.set_num_threads(before)


def test_mixed_precision_computes_in_bf16_exactly_where_the_processor_does():
    with mixed_precision(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    fast = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert product.dtype == (torch.bfloat16 if fast else torch.float32)
