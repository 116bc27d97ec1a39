"""How well a model in training answers held-out questions, without generating an answer.

One forward pass over a question with its reference answer gives both the answer's likelihood and whether a greedy
search would give this answer: it does exactly if, at each of the answer's tokens up to the one that ends it, no token
is likelier than the reference's. Arithmetic may round otherwise than where answers are generated token by token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from dj2mgm.mgm.loss import LanguageModelHead, recording_likelihoods
from dj2mgm.training.batches import padded_width
from dj2mgm.training.datasets import Collator
from dj2mgm.training.held_out import HeldOut
from dj2mgm.training.processes import agree
from dj2mgm.training.settings import ScoreSettings


@dataclass(frozen=True)
class Score:
    loss: float  # mean over all tokens that carry loss, in nats
    correct: str  # for each question "1" or "0": whether a greedy search gives the reference answer
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.correct.count("1") / len(self.correct)


MARGIN = 0.6  # of the time that is given: later scores may take longer
FIRST = 8  # questions in the first micro batch where time is measured; those after it have twice as many each
Answered = tuple[float, int, bool]  # log-likelihood in nats, tokens, whether a greedy search gives the answer


class Scorer:
    """Asks held-out questions of the engine that is trained, by all processes together, in micro batches of no more
    samples and tokens than those of training, without gradients. What is compiled for training runs as it was before:
    it would be compiled once more.

    Args:
        inputs_of: as in `StageTrainer`.
        micro_batch_size, longest: of training's micro batches, in samples and in tokens of a sample.
        workers: processes that decode images.
    """

    def __init__(
        self,
        held_out: HeldOut,
        settings: ScoreSettings,
        head: LanguageModelHead,
        inputs_of: Callable[[dict[str, torch.Tensor], torch.device], dict[str, torch.Tensor]],
        micro_batch_size: int,
        longest: int,
        workers: int,
    ):
        self.held_out, self.settings, self.head, self.inputs_of = held_out, settings, head, inputs_of
        self.samples, self.tokens = micro_batch_size, micro_batch_size * longest
        self.longest = max(longest, *held_out.lengths)
        self.workers = workers
        self.stops = torch.tensor(sorted(held_out.encoder.stops))

    def score(self, engine: nn.Module, device: torch.device, count: int | None, seconds: float) -> Score:
        """
        Args:
            count: how many questions are asked, the first ones; None: as many as take about `seconds`.
        """
        start = time.monotonic()
        process, processes = 0, 1
        if distributed.is_initialized():
            process, processes = distributed.get_rank(), distributed.get_world_size()
        batches = self._micro_batches(count, processes)
        # as many for each process, since ZeRO-3's layers are gathered together; what is asked twice counts once
        places = range(process, process + len(batches), processes)
        own = [batches[min(place, len(batches) - 1)] for place in places]
        answered: dict[int, Answered] = {}
        ends: list[float] = []
        with _undisturbed(engine), recording_likelihoods(self.head) as found:
            for batch, asked in zip(self._loader(own), own, strict=True):
                engine(**self.inputs_of(dict(batch), device))
                answered |= zip(asked, self._answers(batch, *found.pop()), strict=True)
                ends.append(time.monotonic() - start)
                if count is None and len(ends) > 1 and not agree(lambda: ends[-1] < seconds):
                    break
        if processes > 1:
            parts: list[dict[int, Answered] | None] = [None] * processes
            distributed.all_gather_object(parts, answered)
            answered = {number: answer for part in parts for number, answer in part.items()}
        if count is None:
            sizes = [len(asked) * processes for asked in own[: len(ends)]]
            count = agree(lambda: min(len(answered), fitting(sizes, ends, seconds)))
        values = [answered[number] for number in range(count)]
        loss = -sum(value for value, _, _ in values) / sum(tokens for _, tokens, _ in values)
        correct = "".join("01"[hit] for *_, hit in values)
        return Score(loss, correct, time.monotonic() - start)

    def _micro_batches(self, count: int | None, processes: int) -> list[list[int]]:
        """Numbers of questions in their order, so that the first batches are about the first questions."""
        batches: list[list[int]] = [[]]
        for number in range(len(self.held_out) if count is None else count):
            most = self.samples if count else min(self.samples, FIRST << (len(batches) - 1) // processes)
            widest = max(padded_width(self.held_out.lengths[each], self.longest) for each in (*batches[-1], number))
            size = len(batches[-1]) + 1
            if batches[-1] and (size > most or size * widest > self.tokens):
                batches.append([])
            batches[-1].append(number)
        return batches

    def _loader(self, batches: Sequence[list[int]]) -> DataLoader:
        return DataLoader(
            self.held_out,
            batch_sampler=batches,
            collate_fn=Collator(self.held_out.encoder, self.longest),
            num_workers=min(self.workers, len(batches)),
            prefetch_factor=1 if self.workers else None,
            generator=torch.Generator().manual_seed(0),  # it would draw from training's random numbers
        )

    def _answers(self, batch: dict[str, torch.Tensor], values: torch.Tensor, hits: torch.Tensor) -> Iterator[Answered]:
        """Of each row of a micro batch; values and hits (n,) at all of its answers."""
        values, hits = values.cpu(), hits.cpu()
        positions, labels = batch["answer_positions"], batch["labels"]
        row_of = positions // labels.shape[1]
        ends = torch.isin(labels.flatten()[positions + 1], self.stops)
        for row in range(len(labels)):
            own = row_of == row
            until = ends[own].long().cumsum(0) - ends[own].long() == 0  # up to and with the first that ends it
            yield values[own].sum().item(), int(own.sum()), bool(hits[own][until].all())


def fitting(sizes: Sequence[int], ends: Sequence[float], seconds: float) -> int:
    """How many questions take `seconds`, at least one.

    Args:
        sizes, ends: of micro batches: how many questions, and when they were answered. The first is not looked at if
            there are more: it takes longer than any later one.
    """
    if ends[-1] < seconds:
        return sum(sizes)
    asked, took = (sum(sizes[1:]), ends[-1] - ends[0]) if len(ends) > 1 else (sizes[0], ends[0])
    return max(1, int(MARGIN * seconds * asked / took))


@contextmanager
def _undisturbed(engine: nn.Module) -> Iterator[None]:
    """Training goes on afterwards as if nothing had been computed."""
    training = engine.training
    engine.eval()
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        engine.train(training)
