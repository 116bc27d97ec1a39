"""Frozen linear layers in FP8, whose products run at twice the rate of bf16 on GPUs that have FP8.

Every row of both factors has its own scale, which maps its greatest element to that of E4M3 ("rowwise scaling";
Micikevicius et al., FP8 Formats for Deep Learning, 2022). A product sums over a row of the activations and a row of the
weight. The backward pass sums over the weight's other dimension, so it needs a second copy with scales for it. Two
copies of one byte are as large as one in bf16.
"""

import torch
from torch import nn

from dj2mgm.compute import default_device
from dj2mgm.config.training import FP8_CAPABILITY
from dj2mgm.errors import InputError

E4M3 = torch.float8_e4m3fn
GREATEST = torch.finfo(E4M3).max
ALIGNMENT = 16  # divides both dimensions of a weight


def check_fp8() -> None:
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
        weight = linear.weight.detach().to(default_device())  # quantization is much faster on a GPU
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
        return _product(x, forward_values, forward_scales)

    @staticmethod
    def backward(ctx, gradient):
        return _product(gradient, *ctx.saved_tensors), None, None, None, None


def _product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
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
    scales = matrix.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / GREATEST
    return (matrix / scales).to(E4M3), scales
