"""Measure the cost of the memory sampler for a training step, by blocks of steps with and without it.

    python benchmarks/memory_sampler.py [--blocks 20] [--block-seconds 6]

Both kinds of blocks alternate. Steps are timed by the clock and in CPU time (all threads of the process). On a busy
machine both are noisy, and only the time spent in readings, an upper bound of the cost, is reliable.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow_scripts"))

from dj2mgm.monitoring.readings import MemorySampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--block-seconds", type=float, default=6)
    args = parser.parse_args()

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def measure_step() -> tuple[float, float]:
        """Return seconds of a step by the clock and in CPU time."""
        start, cpu_start, steps = time.monotonic(), time.process_time(), 0
        while (seconds := time.monotonic() - start) < args.block_seconds:
            step()
            steps += 1
        return seconds / steps, (time.process_time() - cpu_start) / steps

    measure_step()  # warm-up
    clock_ratios, cpu_ratios, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.blocks):
            without_sampler = measure_step()
            sampler = MemorySampler(Path(folder) / "raw/memory.csv", resumed=False)
            sampler.start()
            with_sampler = measure_step()
            shares.append(sampler.finish(Path(folder))["sampler_share"])
            clock_ratios.append(with_sampler[0] / without_sampler[0])
            cpu_ratios.append(with_sampler[1] / without_sampler[1])
    for name, ratios in (("by the clock", clock_ratios), ("in CPU time", cpu_ratios)):
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"step with / without sampler, {name}: median {middle:.4f}, quartiles {low:.4f}–{high:.4f}")
    print(f"time spent in readings: median {statistics.median(shares):.2%} of the block")


if __name__ == "__main__":
    main()
