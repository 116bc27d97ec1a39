"""Influence of training rows on answers, from forward passes alone (For-Value, arXiv 2508.10180).

The loss of a row has the gradient Σ (p − y) hᵀ with respect to the language model's head. The sum is over the row's
labelled tokens: h is the hidden state (H), p the predicted distribution and y the one-hot target (V). A step of
gradient descent on the row lowers the loss of an answer in proportion to the inner product of both gradients. This
product is the row's influence on the answer; it is negative if training on the row makes the answer less likely.

Only the head's gradient is counted, so influences rank rows; they do not predict a score.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dj2mgm.models.loss import LanguageModelHead, compute_loss_and_gradient
from dj2mgm.models.vision_language import Encoder, ModelFamily

ROWS_AT_ONCE = 32
TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class LabelledTokens:
    """Inputs of the head at n labelled tokens of several rows.

    Attributes:
        hidden: (n, H).
        targets: (n,), token ids.
        rows: (n,), the row of each token, in ascending order from 0.
        count: number of rows.
    """

    hidden: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    count: int

    @classmethod
    def concatenate(cls, parts: Sequence["LabelledTokens"]) -> "LabelledTokens":
        """Join rows, in their order."""
        starts = [sum(part.count for part in parts[:number]) for number in range(len(parts))]
        return cls(
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.rows + start for part, start in zip(parts, starts, strict=True)]),
            sum(part.count for part in parts),
        )

    def compute_errors(self, head: LanguageModelHead) -> torch.Tensor:
        """Return p − y (n, V) in the weight's dtype."""
        return compute_loss_and_gradient(self.hidden @ head.weight.T, self.targets, head.softcap)[1]

    def split(self, size: int) -> Iterator["LabelledTokens"]:
        """Yield parts of at most `size` tokens, whose rows keep their numbers."""
        tensors = (self.hidden.split(size), self.targets.split(size), self.rows.split(size))
        for hidden, targets, rows in zip(*tensors, strict=True):
            yield LabelledTokens(hidden, targets, rows, self.count)


@torch.no_grad()
def read_labelled_tokens(
    model: nn.Module, family: ModelFamily, encoder: Encoder, rows: Sequence[dict], device: torch.device
) -> Iterator[LabelledTokens]:
    """Yield the labelled tokens of `ROWS_AT_ONCE` conversations at a time, with the hidden states of the model."""
    with _record_inputs(family.find_parts(model).head) as inputs:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            items = [encoder.encode_row(row) for row in rows[start : start + ROWS_AT_ONCE]]
            width = max(len(item["input_ids"]) for item in items)
            batch = encoder.batch(items, width)
            model(**family.prepare_inputs(batch, device))
            hidden, targets = inputs.pop()
            yield LabelledTokens(hidden, targets, (batch["answer_positions"] // width).to(device), len(items))


@contextmanager
def _record_inputs(head: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collect the hidden states and targets that the head receives."""
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = head.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments))
    try:
        yield inputs
    finally:
        handle.remove()


@torch.no_grad()
def measure_influence(rows: LabelledTokens, answers: LabelledTokens, head: LanguageModelHead) -> torch.Tensor:
    """Return the influence (R, A) of R rows on A answers, float32."""
    token_influence = torch.zeros(rows.count, len(answers.targets), device=rows.hidden.device)  # (R, tokens)
    errors = answers.compute_errors(head)
    for part in rows.split(TOKENS_AT_ONCE):
        products = (part.hidden @ answers.hidden.T) * (part.compute_errors(head) @ errors.T)
        token_influence.index_add_(0, part.rows, products.float())
    return token_influence.new_zeros(rows.count, answers.count).index_add_(1, answers.rows, token_influence)


class ExtremeRows:
    """The rows with the lowest and the highest influence on each answer; rows are added in parts."""

    def __init__(self, count: int):
        self.count = count
        self.rows = 0
        self.lowest: tuple[torch.Tensor, torch.Tensor] | None = None  # values and rows, both (k, A)
        self.highest: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, influence: torch.Tensor) -> None:
        """Add the influence (R, A) of the next R rows."""
        numbers = torch.arange(self.rows, self.rows + len(influence), device=influence.device)
        candidates = influence, numbers.unsqueeze(1).expand_as(influence)
        self.lowest = self._select_extremes(self.lowest, candidates, largest=False)
        self.highest = self._select_extremes(self.highest, candidates, largest=True)
        self.rows += len(influence)

    def find_lowest(self, answer: int) -> list[tuple[float, int]]:
        """Return value and number of each row with a low influence on an answer, the lowest first."""
        return self._list_pairs(self.lowest, answer)

    def find_highest(self, answer: int) -> list[tuple[float, int]]:
        """Return value and number of each row with a high influence on an answer, the highest first."""
        return self._list_pairs(self.highest, answer)

    @staticmethod
    def _list_pairs(extremes: tuple[torch.Tensor, torch.Tensor], answer: int) -> list[tuple[float, int]]:
        values, rows = (tensor[:, answer].tolist() for tensor in extremes)
        return list(zip(values, rows, strict=True))

    def _select_extremes(self, extremes, candidates, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, rows = candidates
        if extremes:
            values, rows = (torch.cat(pair) for pair in zip(extremes, candidates, strict=True))
        selection = values.topk(min(self.count, len(values)), dim=0, largest=largest)
        return selection.values, rows.gather(0, selection.indices)
