"""What stands on the meta device for kernels that only a GPU has: same results' shapes, same tensors kept for backward.

The originals are PyTorch's FlashAttention (behind SDPA), liger-kernel 0.8.5's RMSNorm, GeGLU/SwiGLU and fused linear
cross-entropy, and Mamba's selective scan, whose loop over the sequence would take minutes here.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import AttentionInterface
from transformers.models.mamba import modeling_mamba

ATTENTION = "planned"


def _attention(module, query, key, value, attention_mask, **kwargs):
    """(B, heads, T, D) each → (B, T, heads, D). Keeps query, key, value, output and one number per row."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a padding mask SDPA takes as many keys as queries
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    causal = getattr(module, "is_causal", False)
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number per row; the gradient is written over the incoming one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.empty_like(ctx.saved_tensors[1])


class _GatedActivation(torch.autograd.Function):
    """act(a) · b: keeps a and b, over which their gradients are written."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in the forward pass, for as many rows at a time as make the logits as large as the input."""

    @staticmethod
    def forward(ctx, hidden, weight):
        gradient = torch.empty_like(hidden)
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        chunks = math.ceil(weight.shape[0] / weight.shape[1])
        rows = 2 ** math.ceil(math.log2(math.ceil(len(hidden) / chunks)))
        logits = torch.empty(rows, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        del logits
        ctx.save_for_backward(gradient, weight_gradient)
        return torch.empty((), dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors


def fused_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden (answer tokens, H), weight (V, H) → a scalar."""
    return _FusedLinearCrossEntropy.apply(hidden, weight)


def fuse_layers(language_model: nn.Module) -> None:
    """Give a language model's norms and gated MLPs the stand-ins' forward."""
    for module in language_model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, own=module: _RMSNorm.apply(x, own.weight)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            module.forward = lambda x, own=module: own.down_proj(
                _GatedActivation.apply(own.gate_proj(x), own.up_proj(x))
            )


class _Scan(torch.autograd.Function):
    """All states of h ← a·h + b: keeps a and the states, as the loop over the sequence does."""

    @staticmethod
    def forward(ctx, a, b):
        states = torch.empty_like(b)
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient), torch.empty_like(gradient)


def _selective_scan(x, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **kwargs):
    """transformers' `mamba_selective_scan` without its loop: x, dt, z (B, inner, T); A (inner, S); B, C (B, S, T)."""
    dt = nn.functional.softplus(dt + delta_bias[..., None])
    a = torch.exp(A[None, :, None, :] * dt[..., None])  # (B, inner, T, S)
    b = dt[..., None] * B.transpose(1, 2)[:, None].float() * x[..., None].float()
    states = _Scan.apply(a, b).to(x.dtype)
    output = (states.transpose(1, 2) @ C.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    return (output + x * D[None, :, None]) * silu(z)


@contextmanager
def one_operation_scans() -> Iterator[None]:
    original = modeling_mamba.mamba_selective_scan
    modeling_mamba.mamba_selective_scan = _selective_scan
    try:
        yield
    finally:
        modeling_mamba.mamba_selective_scan = original
