"""Frozen linear layers in NF4 (QLoRA: Dettmers et al., 2023), with a quarter of bf16's memory and products in bf16.

Weights are 4-bit codes with an 8-bit scale for each 64 of them ("double quantization"), quantized by torchao. A weight
is dequantized for each product, and freed after it. The product is a custom operation, because torch.compile would
otherwise keep all dequantized weights for the backward pass.
"""

from functools import cache

import torch
from torch import nn
from torchao.quantization import to_nf4

from dj2mgm.compute import default_device
from dj2mgm.config.training import takes_nf4

TENSORS = ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4")  # of an NF4Tensor


class FrozenNF4Linear(nn.Module):
    """Linear layer in NF4: x (…, I) → x Wᵀ + b (…, O) in x's dtype, with gradients of x only."""

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        return takes_nf4(weight.numel())

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = to_nf4(linear.weight.detach().to(default_device()))  # quantization is much faster on a GPU
        # not buffers, because DeepSpeed would cast them to bf16
        self.parts = [getattr(weight, name) for name in TENSORS]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = _product(x.flatten(0, -2), self.parts, self.out_features, False).unflatten(0, x.shape[:-1])
        return output if self.bias is None else output + self.bias


@torch.library.custom_op("dj2mgm::nf4_product", mutates_args=())
def _product(x: torch.Tensor, parts: list[torch.Tensor], rows: int, backward: bool) -> torch.Tensor:
    """Multiply x (n, I) · Wᵀ (I, O) → (n, O), or in the backward pass x (n, O) · W (O, I) → (n, I); `rows` is O."""
    weight = _dequantizer(x.device.type)(parts, rows).to(x.dtype)
    return x @ (weight if backward else weight.T)


@_product.register_fake
def _(x, parts, rows, backward):
    columns = 2 * parts[TENSORS.index("quantized_data")].numel() // rows
    return x.new_empty(x.shape[0], columns if backward else rows)


def _keep(ctx, inputs, output) -> None:
    _, parts, ctx.rows, _ = inputs
    ctx.save_for_backward(*parts)


def _gradient(ctx, gradient: torch.Tensor) -> tuple:
    parts = list(ctx.saved_tensors)
    return _product(gradient, parts, ctx.rows, True), [None] * len(parts), None, None


_product.register_autograd(_gradient, setup_context=_keep)


@cache
def _dequantizer(device: str):
    """Return `_dequantize`, compiled for a GPU: uncompiled, it needs seven times the memory of its result."""
    return torch.compile(_dequantize) if device == "cuda" else _dequantize


def _dequantize(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    scales, factors, mean, codes, table = parts
    blocks = codes.numel() // 32
    scales = scales.view(len(factors), -1).to(factors.dtype) / factors.unsqueeze(-1) + mean
    values = table[torch.stack([codes >> 4, codes & 15], dim=-1).int()].view(blocks, 64)
    return (values * scales.view(blocks, 1)).view(rows, -1)
