"""Training data, which are conversations with images, and the micro batches of each step."""

import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch.utils.data import Dataset, Sampler

from dj2mgm.data.formats import find_control_problem, find_image_problem, list_images
from dj2mgm.errors import InputError
from dj2mgm.models.vision_language import Encoder, ImageBeyondMaxLengthError, cast_images
from dj2mgm.storage.files import read_jsonl
from dj2mgm.storage.streaming import LineIndex

MAX_WIDTHS = 32  # widths of micro batches: a GPU's kernels are planned once for each width
LENGTH_MULTIPLE = 8  # tokens
# a micro batch has at most this many times `micro_batch_size` samples, because each image takes memory
MAX_CROWDING = 2


class StepBatches(Sampler[list[int | None]]):
    """Micro batches of one process in an epoch, as lists of row numbers; an epoch has every sample once.

    A step takes the next `global_batch` samples of the shuffled epoch, for any number of processes. Because its loss is
    one sum over all its tokens, the split into micro batches does not change it, and samples of similar length can
    share a micro batch. A micro batch has at most as many tokens, including padding, as `micro_batch_size` samples of
    the greatest length, and at most `MAX_CROWDING` times as many samples. All processes have equally many micro batches
    in a step, with about as many tokens. A process without samples left takes `[None]`, which carries no loss.

    Args:
        lengths: (N,) tokens of each sample.
        micro_batch_size: samples of the greatest length in a micro batch.
        global_batch: samples of a step, over all processes; the epoch's last step may have fewer.
        seed: seed of the order, which differs from epoch to epoch.
        processes: number of processes.
        process: number of this process, from 0.
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
        self.widths = array("i", (compute_padded_width(length, longest) for length in lengths))
        longest = max(self.widths)
        self.tokens, self.samples = micro_batch_size * longest, micro_batch_size * MAX_CROWDING
        self.global_batch, self.seed = global_batch, seed
        self.processes, self.process = processes, process
        self.epoch, self.first_step = 0, 0
        # both the loader and the trainer read a step's micro batches
        self._shuffle_samples = lru_cache(maxsize=1)(self._shuffle_samples)
        self.step = lru_cache(maxsize=8)(self._build_step)

    def __len__(self) -> int:
        """Return the steps of an epoch, the unit in which the trainer counts."""
        return -(-len(self.widths) // self.global_batch)

    def count_samples(self, steps: int) -> int:
        """Return the samples of a training's first `steps` steps; a row counts once for each epoch."""
        epochs, steps = divmod(steps, len(self))
        return epochs * len(self.widths) + min(steps * self.global_batch, len(self.widths))

    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield the micro batches from step `first_step` on."""
        for number in range(self.first_step, len(self)):
            yield from self.step(self.epoch, number)

    def list_samples(self, epoch: int, number: int) -> list[int]:
        """Return the samples of a step, over all processes."""
        start = number * self.global_batch
        return self._shuffle_samples(epoch)[start : start + self.global_batch]

    def _build_step(self, epoch: int, number: int) -> list[list[int | None]]:
        """Return this process's micro batches of a step."""
        samples = self.list_samples(epoch, number)
        samples.sort(key=lambda sample: (-self.widths[sample], sample))
        count = len(self._fill(samples, self.tokens))
        if self.processes == 1:
            return self._split(samples, count)
        # The least limit of tokens at which the micro batches suffice makes them about equal, so that no process waits.
        count = -(-count // self.processes) * self.processes
        limits = range(self.widths[samples[0]], self.tokens + 1)
        least = bisect_left(limits, True, key=lambda tokens: len(self._fill(samples, tokens)) <= count)
        batches = self._fill(samples, limits[least])
        return self._share(batches + [[None]] * (count - len(batches)))[self.process]

    def _share(self, batches: list[list[int | None]]) -> list[list[list[int | None]]]:
        """Return the micro batches of each process, equally many and with about equal tokens."""
        shares = [[] for _ in range(self.processes)]
        tokens = [0] * self.processes
        for batch in sorted(batches, key=self._count_tokens, reverse=True):
            open_shares = [n for n, share in enumerate(shares) if len(share) * self.processes < len(batches)]
            number = min(open_shares, key=tokens.__getitem__)
            shares[number].append(batch)
            tokens[number] += self._count_tokens(batch)
        return shares

    def _count_tokens(self, batch: list[int | None]) -> int:
        """Return the tokens of a micro batch, including padding."""
        return 0 if batch == [None] else len(batch) * max(self.widths[sample] for sample in batch)

    def _shuffle_samples(self, epoch: int) -> list[int]:
        # not the sum of seed and epoch: one seed's second epoch would equal the next seed's first
        seed = random.Random(f"{self.seed}/{epoch}").getrandbits(63) if epoch else self.seed
        return torch.randperm(len(self.widths), generator=torch.Generator().manual_seed(seed)).tolist()

    def _fill(self, samples: list[int], tokens: int) -> list[list[int]]:
        """Return the fewest micro batches of at most `tokens` tokens for samples, the longest first.

        The last one has two samples rather than one, because PyTorch compiles layers again for a batch of one.
        """
        batches, free = [], 0
        for sample in samples:
            if not free:
                batches.append([])
                free = self._compute_capacity(self.widths[sample], tokens)
            batches[-1].append(sample)
            free -= 1
        if len(batches) > 1 and len(batches[-1]) == 1 and len(batches[-2]) > 2:
            batches[-1].insert(0, batches[-2].pop())
        return batches

    def _compute_capacity(self, width: int, tokens: int) -> int:
        """Return the number of samples of this width that a micro batch of at most `tokens` tokens may have."""
        return min(self.samples, tokens // width)

    def _split(self, samples: list[int], count: int) -> list[list[int]]:
        """Split samples, the longest first, into `count` micro batches with the least padding.

        In this choice a single sample counts as two.
        """
        widths = [self.widths[sample] for sample in samples]
        # tokens[end]: tokens of the first `end` samples in the micro batches so far; begins: start of the last of these
        tokens, begins = [0.0] + [float("inf")] * len(samples), []
        for _ in range(count):
            before, tokens = tokens, [float("inf")] * (len(samples) + 1)
            begin_at = [0] * (len(samples) + 1)
            for begin, width in enumerate(widths):
                for end in range(begin + 1, min(len(samples), begin + self._compute_capacity(width, self.tokens)) + 1):
                    if (total := before[begin] + width * max(2, end - begin)) < tokens[end]:
                        tokens[end], begin_at[end] = total, begin
            begins.append(begin_at)
        batches, end = [], len(samples)
        for begin_at in reversed(begins):
            batches.append(samples[begin_at[end] : end])
            end = begin_at[end]
        return batches[::-1]


def compute_padded_width(length: int, longest: int) -> int:
    """Return a length rounded up to one of at most `MAX_WIDTHS` widths, so that kernels see few and even shapes.

    Widths are multiples of a power of two, except the greatest. It is `longest`, on a GPU rounded up to a multiple of
    `LENGTH_MULTIPLE`, because inductor compiles layers again for other widths.
    """
    aligned = LENGTH_MULTIPLE if _has_gpu() else 1
    unit = max(aligned, 1 << max(0, -(-longest // MAX_WIDTHS) - 1).bit_length())
    return min(-(-longest // aligned) * aligned, -(-length // unit) * unit)


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


class ConversationDataset(Dataset):
    """Conversations of jsonl files, one per line, with absolute image paths, read and decoded on access.

    Items are the encoder's; item None carries no loss.

    Attributes:
        lengths: (N,) tokens of each conversation.
        answers: (N,) tokens of each conversation that carry loss; the first token never does.
        images: (N,) number of images of each conversation.
        longest: tokens of the longest conversation, with the blank image of a micro batch without images.
        largest_images: images of the conversation whose images have the most tokens.
    """

    def __init__(self, paths: str | Path | Sequence[Path], encoder: Encoder):
        self.encoder = encoder
        self.lengths, self.answers, self.images = array("i"), array("i"), array("i")
        self.longest, self.largest_images = 0, []
        paths = [paths] if isinstance(paths, str | Path) else paths
        most_tokens = -1
        for path in paths:
            most_tokens = self._measure(path, most_tokens)
        if not self.lengths:
            raise InputError(f"{' and '.join(map(str, paths))}: there are no conversations to train on")
        if not any(self.answers):
            raise InputError(
                f"{' and '.join(map(str, paths))}: no token of any answer lies within max_length; raise max_length, or "
                "shorten the questions"
            )
        self.files = [LineIndex(path) for path in paths]

    def _measure(self, path: str | Path, most_tokens: int) -> int:
        """Check and measure all rows of a file; return the tokens of the largest images so far."""
        too_long: list[ImageBeyondMaxLengthError] = []
        for number, row in enumerate(read_jsonl(path), start=1):  # rows are not kept in memory
            if problem := find_image_problem(row) or find_control_problem(row, self.encoder.control_tokens):
                raise InputError(f"{path}, row {number}: {problem}; fix or delete the row")
            try:
                length, answer_tokens = self.encoder.count_tokens(row)
            except ImageBeyondMaxLengthError as error:
                too_long.append(error)
                continue
            if (images := list_images(row)) and (tokens := self.encoder.count_image_tokens(row)) > most_tokens:
                self.largest_images, most_tokens = images, tokens
            self.longest = max(self.longest, length if images else length + self.encoder.blank_tokens)
            self.lengths.append(length)
            self.answers.append(answer_tokens)
            self.images.append(len(images))
        if too_long:
            longest = max(too_long, key=lambda error: error.end)
            raise InputError(
                f"{path}: the images of {len(too_long)} of {number} rows do not fit. The longest: {longest}"
            )
        return most_tokens

    def describe_truncation(self) -> str | None:
        """Return a note about conversations that the encoder truncates; None if there are none."""
        max_length = self.encoder.max_length
        whole = sum(length < max_length for length in self.lengths)
        if whole == len(self):
            return None
        return (
            f"{len(self) - whole} of {len(self)} conversations have at least max_length ({max_length}) tokens and are "
            f"truncated; {self.answers.count(0)} of all have no token of an answer left to learn"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | None) -> dict:
        return self.encoder.encode_row(None if index is None else self._read_row(index))

    def _read_row(self, index: int) -> dict:
        for rows in self.files:
            if index < len(rows):
                return rows[index]
            index -= len(rows)
        raise IndexError


class Collator:
    """Collator of items to the encoder's batch, padded to one of few widths (`compute_padded_width`) up to `longest`.

    `dtype` is the dtype of the model's weights.
    """

    def __init__(self, encoder: Encoder, longest: int, dtype: torch.dtype = torch.float32):
        self.encoder, self.longest, self.dtype = encoder, longest, dtype

    def __call__(self, items: list[dict]) -> dict[str, torch.Tensor]:
        longest_item = max(len(item["input_ids"]) for item in items)
        return cast_images(self.encoder.batch(items, compute_padded_width(longest_item, self.longest)), self.dtype)
