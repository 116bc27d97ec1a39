"""Measure eager attention, SDPA and FlashAttention in a language model, by sequence length.

    python benchmarks/attention.py --model results/models/mgm-2b/mgm
    python benchmarks/attention.py --model results/models/tiny/mgm --lengths 256 512 --passes 1   # to try the script

Each row has the median time of a forward and backward pass and the peak of memory above weights and input. Weights are
random and frozen, as under LoRA, and there is no head, so that rows differ in attention only. Each row is measured in
its own process, free of memory that another one left. The output is rows of Markdown.
"""

import argparse
import multiprocessing
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.utils import is_flash_attn_2_available

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow_scripts"))

from dj2mgm.compute import select_device
from dj2mgm.models.mgm import MGMForConditionalGeneration

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of an assembled MGM")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens")
    parser.add_argument("--passes", type=int, default=5, help="passes behind the median")
    args = parser.parse_args()
    print("| attention | tokens | time | memory |\n|---|---|---|---|")
    for implementation in IMPLEMENTATIONS:
        for length in args.lengths:
            print(f"| {implementation} | {length} | {measure_in_process(args, implementation, length)} |", flush=True)


def measure_in_process(args: argparse.Namespace, implementation: str, length: int) -> str:
    """Return the cells of a configuration, or why it cannot be measured here."""
    if implementation == "flash_attention_2" and not (torch.cuda.is_available() and is_flash_attn_2_available()):
        return "needs a GPU and flash-attn |"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            seconds, gib = pool.submit(measure, args.model, implementation, length, args.passes).result()
        except torch.OutOfMemoryError:
            return "out of GPU memory |"
        except BrokenProcessPool:
            return "killed, probably because host memory ran out |"
    return f"{1000 * seconds:.1f} ms | {gib:.3f} GiB"


def measure(model: Path, implementation: str, length: int, passes: int) -> tuple[float, float]:
    """Return the median seconds and the peak GiB of a pass on one random sequence."""
    device = select_device()
    config = MGMForConditionalGeneration.config_class.from_pretrained(model).text_config
    with torch.device(device):
        decoder = AutoModel.from_config(
            config,
            attn_implementation=implementation,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        )
        shape = (1, length, config.hidden_size)
        inputs = torch.randn(shape, dtype=decoder.dtype, requires_grad=True)
    decoder.requires_grad_(False)

    def forward_and_backward() -> float:
        start = time.monotonic()
        decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state.mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - start

    bytes_before = reset_peak(device)
    forward_and_backward()  # warm-up; memory is measured here, because later passes reuse its freed memory
    peak_bytes = read_peak(device) - bytes_before
    return statistics.median(forward_and_backward() for _ in range(passes)), peak_bytes / 2**30


def reset_peak(device: torch.device) -> int:
    """Forget the peak so far; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets the peak resident size
    return read_resident_size("VmRSS")


def read_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else read_resident_size("VmHWM")


def read_resident_size(field: str) -> int:
    """Return this process's resident size in bytes, now (VmRSS) or at its highest (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", status, flags=re.MULTILINE)[1])


if __name__ == "__main__":
    main()
