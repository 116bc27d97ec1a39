"""Which samples each process takes at each micro step: every sample once an epoch, whatever the number of processes."""

import random
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochBatches(Sampler[list[int | None]]):
    """One process's micro batches of an epoch, as lists of row numbers.

    All processes shuffle alike and deal the micro batches out in turn: a step has the samples that it has on one
    process. Where the last round has none for a process, that process takes `[None]`: a sample that carries no loss.

    Args:
        samples: how many rows there are.
        size: rows of a micro batch; the epoch's last one may have fewer.
        seed: of the order, which is another one in each `epoch`.
    """

    def __init__(self, samples: int, size: int, seed: int, processes: int = 1, process: int = 0):
        self.samples, self.size, self.seed = samples, size, seed
        self.processes, self.process = processes, process
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.samples // (self.size * self.processes))

    def __iter__(self) -> Iterator[list[int | None]]:
        # not the sum of seed and epoch, by which one seed's second epoch would be another's first
        seed = random.Random(f"{self.seed}/{self.epoch}").getrandbits(63) if self.epoch else self.seed
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed)).tolist()
        for turn in range(len(self)):
            start = (turn * self.processes + self.process) * self.size
            yield order[start : start + self.size] or [None]
