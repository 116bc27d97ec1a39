"""Stand-ins on the meta device for kernels that only a GPU has, or that would take minutes.

They have the shapes of the originals, and save the same tensors for the backward pass. The originals are PyTorch's
FlashAttention (behind SDPA), the code that torch.compile generates for eager attention, norms, gated MLPs and the loss,
and Mamba's selective scan with its loop over the sequence. `IntegersOnCPU` computes the shapes that vision-language
models read from integers, such as numbers of patches and token positions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.mamba import modeling_mamba

from dj2mgm.planning.live_memory import find_tensors

ATTENTION, MASKED_ATTENTION = "planned", "planned_with_a_mask"
COMPILED_EAGER_ATTENTION = "planned_as_compiled"
aten = torch.ops.aten
POSITION_MAKERS = (aten.arange, aten.linspace)  # their results keep values, even if they are fractions
MAX_VALUES = 2**20  # elements of a tensor; numbers per token of a micro batch have fewer
INDEX_OPERATORS = (aten.index, aten.index_put, aten.index_put_)


def _attention(module, query, key, value, attention_mask, **kwargs):
    """Map query, key and value, each (B, heads, T, D), to the output (B, T, heads, D).

    Query, key, value, output and one number per row are saved for the backward pass. With a mask (B, 1, T, T), the mask
    is saved too, in the dtype of the query, and keys and values are saved for every head.
    """
    causal = getattr(module, "is_causal", False)
    if attention_mask is not None:
        key, value = (_repeat_heads(tensor, query) for tensor in (key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    if attention_mask is not None:
        output = _SaveTensor.apply(output, torch.empty(attention_mask.shape, dtype=query.dtype, device=query.device))
    return output.transpose(1, 2).contiguous(), None


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values (B, heads, T, D) repeated for every head of the query."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


class _Dropout(torch.autograd.Function):
    """Dropout that saves a mask of one byte per element, as on a GPU.

    On the meta device PyTorch would save a mask in the dtype of `x`, as on a CPU: two bytes per element in bfloat16.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient)


def _compiled_eager_attention(module, query, key, value, attention_mask, dropout=0.0, **kwargs):
    """Map query, key and value, each (B, heads, T, D), to the output (B, T, heads, D) and weights (B, heads, T, T).

    Compiled code saves the scores and the weights, with keys and values for every head. Everything between scores and
    weights (scale, soft cap, mask, float32 softmax) is recomputed in the backward pass, as in a compiled Gemma 2 layer
    under PyTorch 2.13.
    """
    key, value = (_repeat_heads(tensor, query) for tensor in (key, value))
    weights = _Softmax.apply(query @ key.transpose(2, 3))
    if dropout and module.training:
        weights = _Dropout.apply(weights)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class _Softmax(torch.autograd.Function):
    """Softmax that saves its input and two numbers per row.

    Its backward pass reuses the memory of the incoming gradient.
    """

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores, torch.empty(2, *scores.shape[:-1], dtype=torch.float32, device=scores.device))
        return torch.empty_like(scores)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _SaveTensor(torch.autograd.Function):
    """Identity that saves a second tensor for the backward pass."""

    @staticmethod
    def forward(ctx, x, tensor):
        ctx.save_for_backward(tensor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def register_attention() -> None:
    """Register the stand-ins for attention with transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionInterface.register(MASKED_ATTENTION, _attention)
    AttentionInterface.register(COMPILED_EAGER_ATTENTION, _compiled_eager_attention)
    AttentionMaskInterface.register(MASKED_ATTENTION, sdpa_mask)
    AttentionMaskInterface.register(COMPILED_EAGER_ATTENTION, eager_mask)


class _RMSNorm(torch.autograd.Function):
    """Norm that saves its input and one number per row.

    Its backward pass reuses the memory of the incoming gradient.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.empty_like(ctx.saved_tensors[1])


class _GatedActivation(torch.autograd.Function):
    """act(a) · b, which saves a and b. Its backward pass writes their gradients into their memory."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors


def fuse_layers(language_model: nn.Module, head: nn.Module) -> None:
    """Replace eager attention, norms, gated MLPs and dropout of a language model, and its head's loss, by stand-ins."""
    if language_model.config._attn_implementation == "eager":
        language_model.set_attn_implementation(COMPILED_EAGER_ATTENTION)
    for module in language_model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.forward = lambda x, own=module: _Dropout.apply(x) if own.training else x
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, own=module: _RMSNorm.apply(x, own.weight)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            module.forward = lambda x, own=module: own.down_proj(
                _GatedActivation.apply(own.gate_proj(x), own.up_proj(x))
            )
    head.loss_and_gradient = lambda logits, targets: (logits.new_empty(()), torch.empty_like(logits))


class _Scan(torch.autograd.Function):
    """All states of h ← a·h + b. It saves a and the states, like the loop over the sequence."""

    @staticmethod
    def forward(ctx, a, b):
        states = torch.empty_like(b)
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient), torch.empty_like(gradient)


def _selective_scan(x, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **kwargs):  # noqa: N803
    """Compute transformers' `mamba_selective_scan` without its loop.

    Args:
        x: (B, inner, T), like dt and z.
        A: (inner, S).
        B: (B, S, T), like C.
    """
    dt = nn.functional.softplus(dt + delta_bias[..., None])
    a = torch.exp(A[None, :, None, :] * dt[..., None])  # (B, inner, T, S)
    b = dt[..., None] * B.transpose(1, 2)[:, None].float() * x[..., None].float()
    states = _Scan.apply(a, b).to(x.dtype)
    output = (states.transpose(1, 2) @ C.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    return (output + x * D[None, :, None]) * silu(z)


@contextmanager
def selective_scan_without_loop() -> Iterator[None]:
    """Replace transformers' `mamba_selective_scan` by its stand-in inside the context."""
    original = modeling_mamba.mamba_selective_scan
    modeling_mamba.mamba_selective_scan = _selective_scan
    try:
        yield
    finally:
        modeling_mamba.mamba_selective_scan = original


class IntegersOnCPU(TorchDispatchMode):
    """Mode in which a model on the meta device may compute shapes from integers on the CPU.

    Counts and indices stay on the CPU, with their values. The result of an operation with a meta tensor has no values.

    Args:
        assumptions: functions by operation on integers that have no values here, from the operation's first tensor to
            the assumed result. The model's code would read these values from data.
    """

    def __init__(self, assumptions: Mapping[OpOverloadPacket, Callable[[torch.Tensor], torch.Tensor]]):
        super().__init__()
        self.assumptions = assumptions

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operation on the CPU if it makes integers without a meta tensor, otherwise on the meta device."""
        args, kwargs, operation = tuple(args), dict(kwargs or {}), function.overloadpacket
        tensors = list(find_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        if any(tensor.is_meta for tensor in tensors):
            if operation in self.assumptions and not tensors[0].is_floating_point():
                return self.assumptions[operation](tensors[0])
            if operation in INDEX_OPERATORS:
                args = (args[0], _convert_masks_to_positions(args[1]), *args[2:])
            if not all(tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map_only(torch.Tensor, _move_to_meta, (args, kwargs))
            device = None if device is None else torch.device("meta")
        elif tensors and _makes_mask(function, tensors):
            args, kwargs = tree_map_only(torch.Tensor, _move_to_meta, (args, kwargs))
        elif device is not None and device.type == "meta":
            dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
            if tensors or operation in POSITION_MAKERS or not dtype.is_floating_point:
                device = torch.device("cpu")
        if device is not None:
            kwargs["device"] = device
        return function(*args, **kwargs)


def _makes_mask(function: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the result of an operation on tensors has as many elements as a mask of token pairs.

    Computing such masks would take most of a trace, and no shape depends on their values.
    """
    if torch.Tag.pointwise not in function.tags or function._schema.is_mutable:
        return False
    return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors))) > MAX_VALUES


def _move_to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _convert_masks_to_positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks by the positions that they select; the number of positions decides the result's shape."""
    positions = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool and not index.is_meta
        positions += index.nonzero().unbind(1) if is_mask else [index]
    return positions
