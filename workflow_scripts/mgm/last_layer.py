"""Leaves out of the last decoder layer what nobody reads.

After its attention, the last layer computes each position by itself, and a loss reads only those that predict an
answer. Its MLP, 5 % of Gemma-2B's operations, is therefore left out at all others: the loss and its gradients are the
same. It is told so by hooks, so that parameters keep their names and compiled or replaced forwards stay what they are.
"""

import torch
from torch import nn


def let_positions_be_chosen(layer: nn.Module) -> None:
    """Prepare a decoder layer for `choose_positions`."""
    layer.mlp.chosen = None
    layer.mlp.register_forward_pre_hook(_take)
    layer.mlp.register_forward_hook(_put_back)


def choose_positions(layer: nn.Module, chosen: torch.LongTensor | None, hidden: torch.Tensor) -> None:
    """Until the next call, compute the MLP at `chosen` (flat indices into B·T; None: all) of tensors like `hidden`
    (B, T, H), and add nothing elsewhere. Holds for the recomputation in a backward pass, too."""
    layer.mlp.chosen = chosen
    layer.mlp.elsewhere = None if chosen is None else hidden.new_zeros(()).expand(hidden.shape)


def _take(mlp: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor | None:
    """(B, T, H) → (chosen, H)"""
    return None if mlp.chosen is None else args[0].flatten(0, 1).index_select(0, mlp.chosen)


def _put_back(mlp: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
    """(chosen, H) → (B, T, H)"""
    if mlp.chosen is None:
        return None
    return mlp.elsewhere.flatten(0, 1).index_copy(0, mlp.chosen, output).view(mlp.elsewhere.shape)
