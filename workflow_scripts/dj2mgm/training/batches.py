"""Which samples each process computes at each step, and which of them together in a micro batch."""

import random
from array import array
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

import torch
from torch.utils.data import Sampler

WIDTHS = 32  # of all micro batches, at most: a GPU's kernels are planned once for each width
ALIGNED = 8  # tokens
CROWDED = 2  # times as many samples as of the greatest length, at most: each brings an image, which takes memory


class StepBatches(Sampler[list[int | None]]):
    """One process's micro batches of an epoch, as lists of row numbers; an epoch has every sample once.

    A step takes the next `global_batch` samples of the shuffled epoch, on whatever number of processes. Its loss is a
    sum over their tokens, so it does not matter in which order and company they are computed: those of similar length
    share a micro batch. It has as many tokens, padding included, as `micro_batch_size` samples of the greatest length
    at most, and at most `CROWDED` times as many samples. All processes take equally many micro batches in a step, and
    of about the same lengths; who has no sample left takes `[None]`, which carries no loss.

    Args:
        lengths: (N,) tokens of each sample.
        micro_batch_size: samples of the greatest length in a micro batch.
        global_batch: samples of a step, over all processes; the epoch's last step may have fewer.
        seed: of the order, which is another one in each `epoch`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        micro_batch_size: int,
        global_batch: int,
        seed: int,
        processes: int = 1,
        process: int = 0,
    ):
        longest = max(lengths)
        self.widths = array("i", (padded_width(length, longest) for length in lengths))
        longest = max(self.widths)
        self.tokens, self.samples = micro_batch_size * longest, micro_batch_size * CROWDED
        self.global_batch, self.seed = global_batch, seed
        self.processes, self.process = processes, process
        self.epoch, self.first_step = 0, 0
        # the loader asks for a step's micro batches, and so does the trainer
        self._order, self.step = lru_cache(maxsize=1)(self._order), lru_cache(maxsize=8)(self._step)

    def __len__(self) -> int:
        """Steps of an epoch, by which the trainer counts."""
        return -(-len(self.widths) // self.global_batch)

    def samples_in(self, steps: int) -> int:
        """Samples of a training's first `steps` steps; a row counts as often as an epoch had it."""
        epochs, steps = divmod(steps, len(self))
        return epochs * len(self.widths) + min(steps * self.global_batch, len(self.widths))

    def __iter__(self) -> Iterator[list[int | None]]:
        """The micro batches from step `first_step` on."""
        for number in range(self.first_step, len(self)):
            yield from self.step(self.epoch, number)

    def _step(self, epoch: int, number: int) -> list[list[int | None]]:
        """This process's micro batches of a step."""
        start = number * self.global_batch
        samples = self._order(epoch)[start : start + self.global_batch]
        samples.sort(key=lambda sample: (-self.widths[sample], sample))
        shares = [samples[process :: self.processes] for process in range(self.processes)]
        count = max(self._fewest(share) for share in shares)
        return self._split(shares[self.process], count)

    def _order(self, epoch: int) -> list[int]:
        # not the sum of seed and epoch, by which one seed's second epoch would be another's first
        seed = random.Random(f"{self.seed}/{epoch}").getrandbits(63) if epoch else self.seed
        return torch.randperm(len(self.widths), generator=torch.Generator().manual_seed(seed)).tolist()

    def _fewest(self, samples: list[int]) -> int:
        """Micro batches that these samples, the longest first, take at least."""
        count, free = 0, 0
        for sample in samples:
            if not free:
                count, free = count + 1, self._fitting(self.widths[sample])
            free -= 1
        return count

    def _fitting(self, width: int) -> int:
        """Samples of this width that a micro batch may have."""
        return min(self.samples, self.tokens // width)

    def _split(self, samples: list[int], count: int) -> list[list[int | None]]:
        """Samples, the longest first, in `count` micro batches with the least padding.

        One that is alone counts as two, so that it stays so only where it must: PyTorch compiles layers once more for a
        batch of one.
        """
        widths, blank = [self.widths[sample] for sample in samples], max(0, count - len(samples))
        # tokens[end]: of the first `end` samples in the micro batches so far, and where the last of these begins
        tokens, begins = [0.0] + [float("inf")] * len(samples), []
        for _ in range(count - blank):
            before, tokens = tokens, [float("inf")] * (len(samples) + 1)
            begin_at = [0] * (len(samples) + 1)
            for begin, width in enumerate(widths):
                for end in range(begin + 1, min(len(samples), begin + self._fitting(width)) + 1):
                    if (total := before[begin] + width * max(2, end - begin)) < tokens[end]:
                        tokens[end], begin_at[end] = total, begin
            begins.append(begin_at)
        batches, end = [], len(samples)
        for begin_at in reversed(begins):
            batches.append(samples[begin_at[end] : end])
            end = begin_at[end]
        return batches[::-1] + [[None]] * blank


def padded_width(length: int, longest: int) -> int:
    """Return a length rounded up to one of at most `WIDTHS` widths, so that kernels get few and even shapes.

    Widths are multiples of a power of two, except the greatest, which is `longest`; on a GPU it is a multiple of
    `ALIGNED` too, because inductor compiles layers once more for a width that is not.
    """
    aligned = ALIGNED if _has_gpu() else 1
    unit = max(aligned, 1 << max(0, -(-longest // WIDTHS) - 1).bit_length())
    return min(-(-longest // aligned) * aligned, -(-length // unit) * unit)


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()
