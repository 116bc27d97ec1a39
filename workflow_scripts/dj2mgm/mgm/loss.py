"""Next-token cross-entropy at supervised positions, without ever holding logits for all of them.

Logits of a full batch of Gemma's 256 000 words are 500 MiB in bf16 for every 1024 tokens, and most positions carry no
loss. So only supervised positions are projected, some at a time, and their gradient is taken at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Logits of this many rows exist at a time: 250 MiB under 256 000 words in bf16, and enough for an efficient product.
# (Liger's kernel takes 16 to 32 rows under a vocabulary so large, and reads the whole weight for each.)
ROWS_AT_ONCE = 512
ROWS_LOOKED_AT = 128  # without gradients, but in float32: as much memory

Found = tuple[torch.Tensor, torch.Tensor]  # of n targets: log-likelihoods in nats, float32; whether none is likelier


class LanguageModelHead(nn.Linear):
    """Hidden states → logits; or, given targets, their summed cross-entropy in float32.

    The loss is part of the module so that ZeRO-3, which gathers a module's weight around its forward, gathers this one.
    """

    softcap: float | None = None  # as in `loss_and_gradient`
    found: list[Found] | None = None  # what `looking_up` asks for

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_and_gradient = loss_and_gradient  # may be compiled

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """hidden (…, H) → logits (…, V); hidden (n, H) and targets (n,) → scalar."""
        if targets is None:
            return super().forward(hidden)
        if self.found is not None:
            self.found.append(self._look_up(hidden, targets))
            return -self.found[-1][0].sum()
        return _LinearCrossEntropy.apply(hidden, self.weight, targets, self.loss_and_gradient)

    def _look_up(self, hidden: torch.Tensor, targets: torch.Tensor) -> Found:
        parts = zip(hidden.split(ROWS_LOOKED_AT), targets.split(ROWS_LOOKED_AT), strict=True)
        found = [look_up(rows @ self.weight.T, wanted, self.softcap) for rows, wanted in parts]
        if not found:
            return hidden.new_zeros(0, dtype=torch.float32), targets.new_zeros(0, dtype=torch.bool)
        values, hits = zip(*found, strict=True)
        return torch.cat(values), torch.cat(hits)


@contextmanager
def looking_up(head: LanguageModelHead) -> Iterator[list[Found]]:
    """Until it ends, each forward pass with targets adds to the list what it finds at them; it has no gradients."""
    head.found = []
    try:
        with torch.no_grad():
            yield head.found
    finally:
        head.found = None


def look_up(logits: torch.Tensor, targets: torch.Tensor, softcap: float | None = None) -> Found:
    """logits (n, V), targets (n,) → both (n,). Of equally likely words the first counts, as in a greedy search."""
    hits = logits.argmax(dim=-1) == targets
    logits = logits.float()
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1), hits


def loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (n, V), targets (n,) → summed cross-entropy in float32, and its gradient (n, V) in the logits' dtype.

    Args:
        softcap: of logits, which are then softcap · tanh(logits / softcap) (Gemma 2, 2024, section 2).
    """
    bounded = softcap and (logits.float() / softcap).tanh()
    log_probabilities = (bounded * softcap if softcap else logits.float()).log_softmax(dim=-1)
    loss = -log_probabilities.gather(1, targets.unsqueeze(1)).sum()
    words = torch.arange(logits.shape[1], device=logits.device)
    gradient = log_probabilities.exp() - (words == targets.unsqueeze(1)).float()
    if softcap:
        gradient = gradient * (1 - bounded**2)
    return loss, gradient.to(logits.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients in the forward pass, while the logits are at hand, and scales them in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, loss_and_gradient):
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
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
        # in place: each is used once, and the weight's is a gigabyte under 256 000 words
        gradients = [gradient if gradient is None else gradient.mul_(scale) for gradient in ctx.saved_tensors]
        return *gradients, None, None
