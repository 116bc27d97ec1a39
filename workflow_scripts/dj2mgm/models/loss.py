"""Next-token cross-entropy at supervised positions, in chunks.

With Gemma's vocabulary of 256 000, the logits of 1024 tokens take 500 MiB in bf16, and most positions carry no loss. So
only supervised positions are projected, a chunk at a time, and the gradient of a chunk is computed with its logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from dj2mgm.models.vision_language import IGNORE_INDEX

# Logits of this many rows exist at a time: 250 MiB in bf16 for a vocabulary of 256 000, and enough for an efficient
# product. (Liger's kernel takes 16 to 32 rows for so large a vocabulary, and reads the whole weight for each chunk.)
ROWS_AT_ONCE = 512
SCORED_ROWS_AT_ONCE = 128  # without gradients, but in float32; the same memory

# for n targets: log-likelihoods in nats, float32, and whether each target is the likeliest token
TargetLikelihoods = tuple[torch.Tensor, torch.Tensor]


def find_answer_positions(labels: torch.LongTensor) -> torch.LongTensor:
    """Return the flat indices of the tokens whose next label in labels (B, T) is not `IGNORE_INDEX`."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    return (following != IGNORE_INDEX).nonzero().squeeze(1)


class LanguageModelHead(nn.Linear):
    """Language model head: hidden states → logits, or, given targets, their summed cross-entropy in float32.

    The module computes the loss itself because ZeRO-3 gathers a module's weight only around its own forward pass.
    """

    softcap: float | None = None  # as in `compute_loss_and_gradient`
    recorded: list[TargetLikelihoods] | None = None  # filled within `recording_likelihoods`

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_and_gradient = compute_loss_and_gradient  # may be compiled

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits or loss: hidden (…, H) → logits (…, V); hidden (n, H) and targets (n,) → scalar."""
        if targets is None:
            return super().forward(hidden)
        if self.recorded is not None:
            self.recorded.append(self._score_targets(hidden, targets))
            return -self.recorded[-1][0].sum()
        return _LinearCrossEntropy.apply(hidden, self.weight, targets, self.loss_and_gradient)

    def _score_targets(self, hidden: torch.Tensor, targets: torch.Tensor) -> TargetLikelihoods:
        chunks = zip(hidden.split(SCORED_ROWS_AT_ONCE), targets.split(SCORED_ROWS_AT_ONCE), strict=True)
        scored = [score_targets(rows @ self.weight.T, chunk, self.softcap) for rows, chunk in chunks]
        if not scored:
            return hidden.new_zeros(0, dtype=torch.float32), targets.new_zeros(0, dtype=torch.bool)
        values, hits = zip(*scored, strict=True)
        return torch.cat(values), torch.cat(hits)


def compute_answer_loss(
    head: LanguageModelHead,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    answer_positions: torch.Tensor,
    items: torch.Tensor | int | None,
) -> torch.Tensor:
    """Return the mean cross-entropy of the tokens that follow `answer_positions`.

    Args:
        head: the model's output head.
        hidden: last hidden states, (B, T, H).
        labels: token ids, (B, T).
        answer_positions: positions in the flattened batch, (N,).
        items: number of tokens over which the loss is averaged (None: N).
    """
    targets = labels.flatten()[answer_positions + 1]
    total = head(hidden.flatten(0, 1).index_select(0, answer_positions), targets)
    return total / (max(1, len(targets)) if items is None else items)


@contextmanager
def recording_likelihoods(head: LanguageModelHead) -> Iterator[list[TargetLikelihoods]]:
    """Collect the likelihoods of the targets of each forward pass, which runs without gradients."""
    head.recorded = []
    try:
        with torch.no_grad():
            yield head.recorded
    finally:
        head.recorded = None


def score_targets(logits: torch.Tensor, targets: torch.Tensor, softcap: float | None = None) -> TargetLikelihoods:
    """Return the targets' likelihoods: logits (n, V), targets (n,) → both (n,).

    Among equally likely tokens the first is the likeliest, as in a greedy search.
    """
    hits = logits.argmax(dim=-1) == targets
    logits = logits.float()
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1), hits


def compute_loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy in float32, and its gradient (n, V) in the logits' dtype.

    Logits are (n, V), targets (n,). With a softcap, logits become softcap · tanh(logits / softcap) (Gemma 2, 2024,
    section 2).
    """
    bounded = softcap and (logits.float() / softcap).tanh()
    log_probabilities = (bounded * softcap if softcap else logits.float()).log_softmax(dim=-1)
    loss = -log_probabilities.gather(1, targets.unsqueeze(1)).sum()
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    gradient = log_probabilities.exp() - (vocabulary == targets.unsqueeze(1)).float()
    if softcap:
        gradient = gradient * (1 - bounded**2)
    return loss, gradient.to(logits.dtype)


def split_rows(number: int) -> Iterator[slice]:
    """Yield the chunks of `number` rows."""
    for start in range(0, number, ROWS_AT_ONCE):
        yield slice(start, start + ROWS_AT_ONCE)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy whose gradients are computed in the forward pass, with the logits, and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, loss_and_gradient):
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in split_rows(len(hidden)):
            loss, gradient = loss_and_gradient(hidden[rows] @ weight.T, targets[rows])
            total += loss
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[rows])
            if weight_gradient is not None:
                weight_gradient.addmm_(gradient.T, hidden[rows])
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx, scale):
        # in place, because each gradient is used once, and the weight's gradient takes a gigabyte for a vocabulary of
        # 256 000
        gradients = [gradient if gradient is None else gradient.mul_(scale) for gradient in ctx.saved_tensors]
        return *gradients, None, None
