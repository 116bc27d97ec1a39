"""How much memory a computation holds from moment to moment, and its FLOPs, counted on the meta device."""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.mamba import modeling_mamba

aten = torch.ops.aten

# What stands on the meta device for kernels that only a GPU has: same shapes, and the same tensors kept for backward.
#
# The originals are PyTorch's FlashAttention (behind SDPA), what torch.compile makes of norms, gated MLPs and the loss,
# and Mamba's selective scan, whose loop over the sequence would take minutes here.

ATTENTION, MASKED_ATTENTION = "planned", "planned_with_a_mask"


def _attention(module, query, key, value, attention_mask, **kwargs):
    """(B, heads, T, D) each → (B, T, heads, D). Keeps query, key, value, output and one number per row.

    With a mask (B, 1, T, T), keeps that in the dtype of the rest, too, and keys and values for every head.
    """
    causal = getattr(module, "is_causal", False)
    if attention_mask is not None:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    if attention_mask is not None:
        output = _Beside.apply(output, torch.empty(attention_mask.shape, dtype=query.dtype, device=query.device))
    return output.transpose(1, 2).contiguous(), None


class _Beside(torch.autograd.Function):
    """Keeps a second tensor for the backward pass."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(MASKED_ATTENTION, _attention)
AttentionMaskInterface.register(MASKED_ATTENTION, sdpa_mask)


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


def fuse(language_model: nn.Module, head: nn.Module) -> None:
    """Give a language model's norms and gated MLPs, and its head's loss, the stand-ins' forward."""
    for module in language_model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, own=module: _RMSNorm.apply(x, own.weight)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            module.forward = lambda x, own=module: own.down_proj(
                _GatedActivation.apply(own.gate_proj(x), own.up_proj(x))
            )
    head.loss_and_gradient = lambda logits, targets: (logits.new_empty(()), torch.empty_like(logits))


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
def scans_as_one_operation() -> Iterator[None]:
    original = modeling_mamba.mamba_selective_scan
    modeling_mamba.mamba_selective_scan = _selective_scan
    try:
        yield
    finally:
        modeling_mamba.mamba_selective_scan = original


# Vision-language models compute shapes from integers: how many patches an image has, and where its tokens stand.

SPACED = (aten.arange, aten.linspace)  # makers of positions, even where these are fractions
INDEXED = (aten.index, aten.index_put, aten.index_put_)


class ValuesOfIntegers(TorchDispatchMode):
    """Inside the context, a model on the meta device may compute shapes from integers on the CPU.

    What counts and indexes stays there, with its values; what meets a tensor without values loses them.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args, kwargs, operation = tuple(args), dict(kwargs or {}), function.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        if any(tensor.is_meta for tensor in tensors):
            if operation is aten.ne and not tensors[0].is_floating_point():
                # SmolVLM asks which of its tiles have as many black pixels as all: none has
                return torch.ones(tensors[0].shape, dtype=torch.bool)
            if operation in INDEXED:
                args = (args[0], _positions(args[1]), *args[2:])
            args, kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
            device = device and torch.device("meta")
        elif device is not None and device.type == "meta":
            dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
            if tensors or operation in SPACED or not dtype.is_floating_point:
                device = torch.device("cpu")
        if device is not None:
            kwargs["device"] = device
        return function(*args, **kwargs)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks as what they select, whose number decides the result's shape."""
    positions = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool and not index.is_meta
        positions += index.nonzero().unbind(1) if is_mask else [index]
    return positions


# How much memory a computation holds from moment to moment, and its FLOPs, counted while it runs on the meta device.
#
# Every operation runs with its real shapes and without data. A tensor counts from the operation that allocates it until
# nobody refers to it any more, which is what PyTorch's allocators see; so saved activations, what a backward pass
# recomputes, and the temporaries in between are all counted as they occur, whatever the architecture.

# Attention's own: torch 2.6 counts no heads that share keys and values.
FLOPS_OF = flop_registry | {
    aten._scaled_dot_product_flash_attention: lambda query, key, *_, **__: 4 * query.numel() * key.shape[-2],
    aten._scaled_dot_product_flash_attention_backward: lambda _, query, key, *__, **___: (
        10 * query.numel() * key.shape[-2]
    ),
}


# What an operation allocates depends on the shapes it is given. PyTorch derives it in Python, which takes most of the
# time of a trace. Layers are alike, so it is remembered: of operations that return new tensors only, no views.
_remembered: dict[Hashable, tuple | None] = {}  # None: not of this kind


def _run(function: OpOverload, args: tuple, kwargs: dict) -> object:
    """The result of an operation on the meta device."""
    key = function, torch.get_default_dtype(), _described(args), _described(tuple(kwargs.items()))
    if known := _remembered.get(key):
        results = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in known[1:]]
        return results[0] if known[0] is torch.Tensor else known[0](results)
    result = function(*args, **kwargs)
    if key not in _remembered:
        _remembered[key] = _allocated(function, (args, kwargs), result)
    return result


def _described(value: object) -> Hashable:
    """What of an operation's arguments decides what it allocates."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _allocated(function: OpOverload, given: object, result: object) -> tuple | None:
    """The result's type, and size, stride and dtype of each new tensor in it; None where it is not made of such."""
    tensors = [result] if isinstance(result, torch.Tensor) else result
    if function._schema.is_mutable or not isinstance(tensors, list | tuple):
        return None
    arguments = [tensor for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor)]
    if any(tensor.device.type != "meta" for tensor in arguments):  # their values may decide
        return None
    old = {id(tensor.untyped_storage()) for tensor in arguments}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
            return None
        alike = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if id(tensor.untyped_storage()) in old or alike.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
    kind = torch.Tensor if isinstance(result, torch.Tensor) else type(result)
    return kind, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


class LiveMemory(TorchDispatchMode):
    """Inside the context, records after each allocation what is live, in bytes by kind.

    Args:
        kind_of: which of `kinds` a newly allocated tensor is of.
    """

    def __init__(self, kinds: tuple[str, ...], kind_of: Callable[[torch.Tensor], str]):
        super().__init__()
        self.kinds = kinds
        self.flops = 0  # of matrix products, convolutions and attention
        self._kind_of = kind_of
        self._live = np.zeros(len(kinds), dtype=np.int64)
        self._known: dict[int, weakref.ref] = {}
        self._moments: list[np.ndarray] = []

    def know(self, tensors) -> None:
        """Leave these out: parameters, which are counted elsewhere."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage)

    @property
    def count(self) -> int:
        return len(self._moments)

    def mark(self) -> None:
        """Record what is live now, too: less than after the last allocation, if something has been let go since."""
        self._moments.append(self._live.copy())

    def moments(self) -> np.ndarray:
        """(moments, kinds) int64: bytes that were live after each allocation."""
        return np.stack(self._moments)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = _run(function, args, kwargs)
        if count := FLOPS_OF.get(function.overloadpacket):
            self.flops += count(*args, **kwargs, out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage, kind = tensor.untyped_storage(), self.kinds.index(self._kind_of(tensor))
        size, key = storage.nbytes(), id(storage)

        def forget(_) -> None:
            self._live[kind] -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self._live[kind] += size
        self.mark()
