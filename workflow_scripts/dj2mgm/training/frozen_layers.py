"""Frozen linear layers with weights of fewer bits: `precision: fp8` and `precision: nf4`.

FP8: products run at twice the rate of bf16 on GPUs that have FP8. Every row of both factors has its own scale, which
maps its greatest element to the greatest number of E4M3 ("rowwise scaling"; Micikevicius et al., FP8 Formats for Deep
Learning, 2022). A product sums over a row of the activations and a row of the weight. The backward pass sums over the
weight's other dimension, so it needs a second copy with scales for this dimension. Two copies of one byte are as large
as one copy in bf16.

NF4 (QLoRA: Dettmers et al., 2023): a quarter of bf16's memory, and products in bf16. Weights are 4-bit codes with an
8-bit scale for each 64 of them ("double quantization"), quantized by torchao. A weight is dequantized for each product,
and freed after it. The product is a custom operation, because torch.compile would otherwise keep all dequantized
weights for the backward pass.
"""

from functools import cache

import torch
from deepspeed.runtime.zero.utils import is_zero_param
from torch import nn
from torchao.quantization import to_nf4

from dj2mgm.compute import select_device
from dj2mgm.errors import InputError
from dj2mgm.models.tuning import list_frozen_layers
from dj2mgm.settings.training_stages import FP8_CAPABILITY, can_use_nf4

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
ALIGNMENT = 16  # divides both dimensions of a weight


def require_fp8() -> None:
    """Check that the GPU computes in FP8."""
    remedy = "set precision: bf16 (or auto)"
    if not torch.cuda.is_available():
        raise InputError(f"precision: fp8 needs a GPU, and PyTorch finds none here; {remedy}")
    capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        raise InputError(
            "precision: fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), and "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}; {remedy}"
        )


class FrozenFP8Linear(nn.Module):
    """Linear layer in FP8: x (…, I) → x Wᵀ + b (…, O) in x's dtype, with gradients of x only.

    Its buffers have integer dtypes, because DeepSpeed casts floating-point buffers to bf16.
    """

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        return all(size % ALIGNMENT == 0 for size in weight.shape)

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().to(select_device())  # quantization is much faster on a GPU
        for name, matrix in (("forward", weight), ("backward", weight.T)):
            values, scales = quantize_rows(matrix)
            self.register_buffer(f"{name}_values", values.contiguous().view(torch.uint8), persistent=False)
            self.register_buffer(f"{name}_scales", scales.view(torch.int32), persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = self.forward_values, self.forward_scales, self.backward_values, self.backward_scales
        output = _FrozenProduct.apply(x.flatten(0, -2), *factors).unflatten(0, x.shape[:-1])
        return output if self.bias is None else output + self.bias


class _FrozenProduct(torch.autograd.Function):
    """Product x (n, I) → (n, O)."""

    @staticmethod
    def forward(ctx, x, forward_values, forward_scales, backward_values, backward_scales):
        ctx.save_for_backward(backward_values, backward_scales)
        return _multiply_in_fp8(x, forward_values, forward_scales)

    @staticmethod
    def backward(ctx, gradient):
        return _multiply_in_fp8(gradient, *ctx.saved_tensors), None, None, None, None


def _multiply_in_fp8(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x (n, k) by values (m, k) with scales (m, 1); return x · (values · scales)ᵀ (n, m) in x's dtype."""
    rows, row_scales = quantize_rows(x)
    return torch._scaled_mm(
        rows,
        values.view(E4M3).T,
        scale_a=row_scales,
        scale_b=scales.view(torch.float32).T,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of a matrix (n, k); return E4M3 values (n, k) and float32 scales (n, 1)."""
    matrix = matrix.float()
    scales = matrix.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return (matrix / scales).to(E4M3), scales


# tensors of an NF4Tensor
NF4_TENSORS = ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4")


class FrozenNF4Linear(nn.Module):
    """Linear layer in NF4: x (…, I) → x Wᵀ + b (…, O) in x's dtype, with gradients of x only."""

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        return can_use_nf4(weight.numel())

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = to_nf4(linear.weight.detach().to(select_device()))  # quantization is much faster on a GPU
        # not buffers, because DeepSpeed would cast them to bf16
        self.parts = [getattr(weight, name) for name in NF4_TENSORS]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = _multiply_in_nf4(x.flatten(0, -2), self.parts, self.out_features, False).unflatten(0, x.shape[:-1])
        return output if self.bias is None else output + self.bias


@torch.library.custom_op("dj2mgm::nf4_product", mutates_args=())
def _multiply_in_nf4(x: torch.Tensor, parts: list[torch.Tensor], rows: int, backward: bool) -> torch.Tensor:
    """Multiply x (n, I) · Wᵀ (I, O) → (n, O), or in the backward pass x (n, O) · W (O, I) → (n, I); `rows` is O."""
    weight = _make_dequantizer(x.device.type)(parts, rows).to(x.dtype)
    return x @ (weight if backward else weight.T)


@_multiply_in_nf4.register_fake
def _(x, parts, rows, backward):
    columns = 2 * parts[NF4_TENSORS.index("quantized_data")].numel() // rows
    return x.new_empty(x.shape[0], columns if backward else rows)


def _save_for_backward(ctx, inputs, output) -> None:
    _, parts, ctx.rows, _ = inputs
    ctx.save_for_backward(*parts)


def _compute_gradient(ctx, gradient: torch.Tensor) -> tuple:
    parts = list(ctx.saved_tensors)
    return _multiply_in_nf4(gradient, parts, ctx.rows, True), [None] * len(parts), None, None


_multiply_in_nf4.register_autograd(_compute_gradient, setup_context=_save_for_backward)


@cache
def _make_dequantizer(device: str):
    """Return `_dequantize`, compiled for a GPU: uncompiled, it needs seven times the memory of its result."""
    return torch.compile(_dequantize) if device == "cuda" else _dequantize


def _dequantize(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    scales, factors, mean, codes, table = parts
    blocks = codes.numel() // 32
    scales = scales.view(len(factors), -1).to(factors.dtype) / factors.unsqueeze(-1) + mean
    values = table[torch.stack([codes >> 4, codes & 15], dim=-1).int()].view(blocks, 64)
    return (values * scales.view(blocks, 1)).view(rows, -1)


FROZEN_LAYERS = {"fp8": FrozenFP8Linear, "nf4": FrozenNF4Linear}


def replace_frozen_layers(decoder: nn.Module, precision: str) -> None:
    """Replace, in place, all frozen linear layers of `decoder` whose size the format supports."""
    replacement = FROZEN_LAYERS[precision]
    layers = list_frozen_layers(decoder)
    if any(is_zero_param(child.weight) for *_, child in layers):
        raise InputError(f"precision: {precision} needs whole weights, but ZeRO-3 splits them; set deepspeed: zero2")
    layers = [(parent, name, child) for parent, name, child in layers if replacement.supports(child.weight)]
    if not layers:
        raise InputError(f"precision: {precision} supports the size of no frozen layer; set precision: bf16")
    for parent, name, child in layers:
        setattr(parent, name, replacement(child))
