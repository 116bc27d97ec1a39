"""Time and memory of a language model's forward and backward pass, measured with each attention implementation.

Weights are random and frozen, as under LoRA, and there is no head, so that two rows differ in attention only. Each
configuration is measured in its own process, free of memory that another configuration left.
"""

import multiprocessing
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.utils import is_flash_attn_2_available

from dj2mgm.compute import select_device, use_cpu_threads
from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.settings.targets import AttentionSettings

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one configuration; None if it was skipped."""

    implementation: str
    sequence_length: int
    seconds: float | None = None  # median of the passes
    memory_gib: float | None = None  # peak above weights and input
    skipped: str = ""  # reason


def measure_all(model: Path, settings: AttentionSettings) -> Iterator[Measurement]:
    """Measure every implementation at every length; skipped configurations have a reason.

    `model` is the folder of an assembled MGM, whose language model's shape is used.
    """
    for implementation in IMPLEMENTATIONS:
        for length in settings.sequence_lengths:
            reason = _find_obstacle(implementation, length, settings.longest_on_cpu)
            if reason:
                yield Measurement(implementation, length, skipped=reason)
            else:
                yield _measure_in_process(model, implementation, length, settings)


def _find_obstacle(implementation: str, length: int, longest_on_cpu: int) -> str:
    """Return the reason why a configuration cannot be measured; empty if it can."""
    on_gpu = torch.cuda.is_available()
    if implementation == "flash_attention_2":
        if not on_gpu:
            return "needs a GPU"
        if not is_flash_attn_2_available():
            return "flash-attn is not installed"
    if not on_gpu and length > longest_on_cpu:
        return f"longer than {longest_on_cpu}, the limit for a CPU"
    return ""


def _measure_in_process(model: Path, implementation: str, length: int, settings: AttentionSettings) -> Measurement:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, model, implementation, length, settings).result()
        except BrokenProcessPool:
            return Measurement(implementation, length, skipped="killed, probably because host memory ran out")


def measure(model: Path, implementation: str, length: int, settings: AttentionSettings) -> Measurement:
    """Return the median seconds and the peak GiB of a pass on random inputs; `length` counts tokens."""
    use_cpu_threads(settings.cpu_threads)
    device = select_device()
    config = MGMForConditionalGeneration.config_class.from_pretrained(model).text_config
    with torch.device(device):
        decoder = AutoModel.from_config(
            config,
            attn_implementation=implementation,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        )
        shape = (settings.batch_size, length, config.hidden_size)
        inputs = torch.randn(shape, dtype=decoder.dtype, requires_grad=True)
    decoder.requires_grad_(False)

    def forward_and_backward() -> float:
        start = time.monotonic()
        decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state.mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - start

    try:
        bytes_before = _reset_peak(device)
        forward_and_backward()  # warm-up; memory is measured here, because later passes reuse its freed memory
        peak_bytes = _read_peak(device) - bytes_before
        seconds = statistics.median(forward_and_backward() for _ in range(settings.passes))
    except torch.OutOfMemoryError:
        return Measurement(implementation, length, skipped="out of GPU memory")
    return Measurement(implementation, length, seconds, peak_bytes / 2**30)


def _reset_peak(device: torch.device) -> int:
    """Forget the peak so far; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets the peak resident size
    return _read_resident_size("VmRSS")


def _read_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _read_resident_size("VmHWM")


def _read_resident_size(field: str) -> int:
    """Return this process's resident size in bytes, now (VmRSS) or at its highest (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", status, flags=re.MULTILINE)[1])
