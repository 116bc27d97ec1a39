"""Trace the live memory and the FLOPs of a computation on the meta device.

- Stand-ins for kernels that only a GPU has.
- `IntegersOnCPU`: shapes that a model computes from integers.
- `LiveMemory`: live bytes after each allocation, and FLOPs.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.mamba import modeling_mamba

aten = torch.ops.aten

# Stand-ins on the meta device have the shapes of the originals, and keep the same tensors for the backward pass.
#
# The originals are PyTorch's FlashAttention (behind SDPA), the code that torch.compile generates for norms, gated MLPs
# and the loss, and Mamba's selective scan, whose loop over the sequence would take minutes here.

ATTENTION, MASKED_ATTENTION = "planned", "planned_with_a_mask"


def _attention(module, query, key, value, attention_mask, **kwargs):
    """Map query, key and value, each (B, heads, T, D), to the output (B, T, heads, D).

    Query, key, value, output and one number per row are kept. With a mask (B, 1, T, T), the mask is kept too, in the
    dtype of the query, and keys and values are kept for every head.
    """
    causal = getattr(module, "is_causal", False)
    if attention_mask is not None:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    if attention_mask is not None:
        output = _KeepTensor.apply(output, torch.empty(attention_mask.shape, dtype=query.dtype, device=query.device))
    return output.transpose(1, 2).contiguous(), None


class _KeepTensor(torch.autograd.Function):
    """Identity that keeps a second tensor for the backward pass."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def register_attention() -> None:
    """Register the stand-ins for attention with transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionInterface.register(MASKED_ATTENTION, _attention)
    AttentionMaskInterface.register(MASKED_ATTENTION, sdpa_mask)


class _RMSNorm(torch.autograd.Function):
    """Norm that keeps its input and one number per row; its gradient overwrites the incoming one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.empty_like(ctx.saved_tensors[1])


class _GatedActivation(torch.autograd.Function):
    """act(a) · b, which keeps a and b; their gradients overwrite them."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors


def fuse_layers(language_model: nn.Module, head: nn.Module) -> None:
    """Replace the forward pass of a language model's norms and gated MLPs, and its head's loss, by stand-ins."""
    for module in language_model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, own=module: _RMSNorm.apply(x, own.weight)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            module.forward = lambda x, own=module: own.down_proj(
                _GatedActivation.apply(own.gate_proj(x), own.up_proj(x))
            )
    head.loss_and_gradient = lambda logits, targets: (logits.new_empty(()), torch.empty_like(logits))


class _Scan(torch.autograd.Function):
    """All states of h ← a·h + b, which keeps a and the states, like the loop over the sequence."""

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


# Vision-language models compute shapes from integers, such as the number of an image's patches, and token positions.

POSITION_MAKERS = (aten.arange, aten.linspace)  # their results keep values, even if they are fractions
INDEXED = (aten.index, aten.index_put, aten.index_put_)


class IntegersOnCPU(TorchDispatchMode):
    """Mode in which a model on the meta device may compute shapes from integers on the CPU.

    Counts and indices stay on the CPU, with their values. The result of an operation with a meta tensor has no values.

    Args:
        assumed: values that the model's code reads from data: for an operation on integers without values, a function
            of the first one that returns the result.
    """

    def __init__(self, assumed: Mapping[OpOverloadPacket, Callable[[torch.Tensor], torch.Tensor]]):
        super().__init__()
        self.assumed = assumed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args, kwargs, operation = tuple(args), dict(kwargs or {}), function.overloadpacket
        tensors = list(_find_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        if any(tensor.is_meta for tensor in tensors):
            if operation in self.assumed and not tensors[0].is_floating_point():
                return self.assumed[operation](tensors[0])
            if operation in INDEXED:
                args = (args[0], _masks_to_positions(args[1]), *args[2:])
            if not all(tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map_only(torch.Tensor, _move_to_meta, (args, kwargs))
            device = device and torch.device("meta")
        elif device is not None and device.type == "meta":
            dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
            if tensors or operation in POSITION_MAKERS or not dtype.is_floating_point:
                device = torch.device("cpu")
        if device is not None:
            kwargs["device"] = device
        return function(*args, **kwargs)


def _find_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, or in nested lists and tuples, which are all that operations take and return.

    PyTorch's `tree_leaves` took a third of the time of a trace.
    """
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _find_tensors(value)


def _move_to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _masks_to_positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks by the positions that they select, because their number decides the result's shape."""
    positions = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool and not index.is_meta
        positions += index.nonzero().unbind(1) if is_mask else [index]
    return positions


# Every operation runs with its real shapes and without data. A tensor counts from the operation that allocates it until
# its last reference is gone, as in PyTorch's allocators. So saved activations, recomputed activations and temporary
# tensors are counted as they occur, for every architecture.

# Attention has its own formulas, because torch 2.6 does not count heads that share keys and values.
FLOP_FORMULAS = flop_registry | {
    aten._scaled_dot_product_flash_attention: lambda query, key, *_, **__: 4 * query.numel() * key.shape[-2],
    aten._scaled_dot_product_flash_attention_backward: lambda _, query, key, *__, **___: (
        10 * query.numel() * key.shape[-2]
    ),
}


# The allocations of an operation depend on the shapes of its arguments. PyTorch derives them in Python, which takes
# most of the time of a trace. Because layers repeat, results are cached for operations that return only new tensors.
_allocations: dict[Hashable, tuple | None] = {}  # None: an operation of another kind, which is not cached


def _run_cached(function: OpOverload, args: tuple, kwargs: dict) -> object:
    """Return the result of an operation on the meta device."""
    key = function, torch.get_default_dtype(), _describe_shapes(args), _describe_shapes(tuple(kwargs.items()))
    if known := _allocations.get(key):
        return _make_result(known)
    result = function(*args, **kwargs)
    if key not in _allocations:
        _allocations[key] = _describe_result(function, (*args, *kwargs.values()), result)
    return result


def _make_result(described: tuple) -> object:
    """Return new tensors of the size, stride and dtype that `_describe_result` returned."""
    kind, *parts = described
    results = [
        torch.empty_strided(size, stride, dtype=dtype, device="meta") if dtype else size
        for size, stride, dtype in parts
    ]
    return results[0] if kind is torch.Tensor else kind(results)


def _describe_shapes(value: object) -> Hashable:
    """Return the properties of an operation's arguments that decide its allocations."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_describe_shapes, value))
    return type(value), value


def _describe_result(function: OpOverload, given: object, result: object) -> tuple | None:
    """Return the result's type, and size, stride and dtype of its tensors; None unless all of them are new.

    Attention also returns numbers, which are kept as (number, None, None).
    """
    tensors = [result] if isinstance(result, torch.Tensor) else result
    if function._schema.is_mutable or not isinstance(tensors, list | tuple):
        return None
    arguments = list(_find_tensors(given))
    if any(tensor.device.type != "meta" for tensor in arguments):  # the result may depend on their values
        return None
    old = {id(tensor.untyped_storage()) for tensor in arguments}
    described = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, int):
            described.append((tensor, None, None))
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
            return None
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if id(tensor.untyped_storage()) in old or copy.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
        described.append((tensor.shape, tensor.stride(), tensor.dtype))
    kind = torch.Tensor if isinstance(result, torch.Tensor) else type(result)
    return kind, *described


@dataclass(frozen=True)
class Recording:
    """Memory and FLOPs of a part of the model, and a description of its result."""

    moments: np.ndarray  # (moments, kinds) live bytes beyond those before the part
    flops: int
    result: tuple


class LiveMemory(TorchDispatchMode):
    """Mode that records, after each allocation, the live bytes by kind; `classify` returns the kind of a new tensor."""

    active: "LiveMemory | None" = None  # the mode of the running trace

    def __init__(self, kinds: tuple[str, ...], classify: Callable[[torch.Tensor], str]):
        super().__init__()
        self.kinds = kinds
        self.flops = 0  # of matrix products, convolutions and attention
        self._classify = classify
        self._live = np.zeros(len(kinds), dtype=np.int64)
        self._known: dict[int, weakref.ref] = {}
        self._moments: list[np.ndarray] = []

    def __enter__(self) -> "LiveMemory":
        LiveMemory.active = self
        return super().__enter__()

    def __exit__(self, *error) -> None:
        LiveMemory.active = None
        super().__exit__(*error)

    def run_recorded(self, run: Callable[[], object]) -> tuple[object, "Recording | None"]:
        """Run a part of the model; return its result and a recording, unless the result is not made of new tensors."""
        count, before, flops, known = self.count, self._live.copy(), self.flops, set(self._known)
        result = run()
        outputs = list(_find_tensors(result))
        is_new = {id(output.untyped_storage()) for output in outputs}.isdisjoint(known)
        freed = self._live - before - self._sizes(outputs)
        described = _describe_result(torch.ops.aten.empty.memory_format, (), result)
        if described is None or not is_new or freed.any():
            return result, None
        moments = np.stack(self._moments[count:]) - before
        return result, Recording(moments, self.flops - flops, described)

    def replay(self, recording: "Recording") -> object:
        """Record the moments and FLOPs of a part again, and return new tensors as its result.

        Creating the result adds moments that need no more memory than those of the part.
        """
        self._moments.extend(self._live + recording.moments)
        self.flops += recording.flops
        return _make_result(recording.result)

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        """Return the bytes of tensors by kind."""
        sizes = np.zeros(len(self.kinds), dtype=np.int64)
        for tensor in tensors:
            sizes[self.kinds.index(self._classify(tensor))] += tensor.untyped_storage().nbytes()
        return sizes

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors, such as parameters, which are counted elsewhere."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage)

    @property
    def count(self) -> int:
        return len(self._moments)

    def record(self) -> None:
        """Record the live bytes of this moment, too: less than after the last allocation if tensors were freed."""
        self._moments.append(self._live.copy())

    def moments(self) -> np.ndarray:
        """Return the live bytes after each allocation, (moments, kinds) int64."""
        return np.stack(self._moments)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = _run_cached(function, args, kwargs)
        if formula := FLOP_FORMULAS.get(function.overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)
        for tensor in _find_tensors(result):
            if id(tensor.untyped_storage()) not in self._known:
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage, kind = tensor.untyped_storage(), self.kinds.index(self._classify(tensor))
        size, key = storage.nbytes(), id(storage)

        def forget(_) -> None:
            self._live[kind] -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self._live[kind] += size
        self.record()


# Frozen layers of image encoders keep nothing for the backward pass, so equal ones differ in no moment. They take a
# third to two thirds of the time of a trace.


def replay_frozen_layers(model: nn.Module) -> None:
    """Let frozen layers run once for the same inputs, and replay the memory of later runs, also of equal layers."""
    recordings: dict[Hashable, Recording | None] = {}
    for parts in model.modules():
        for layer in parts if isinstance(parts, nn.ModuleList) else ():
            if not any(parameter.requires_grad for parameter in layer.parameters()):
                shapes = tuple(parameter.shape for parameter in layer.parameters())
                layer.forward = partial(_run_frozen, recordings, (repr(layer), shapes), layer.forward)


def _run_frozen(recordings: dict, layer: Hashable, forward: Callable, *args, **kwargs) -> object:
    memory, given = LiveMemory.active, (*args, *kwargs.values())
    if memory is None or any(tensor.requires_grad for tensor in _find_tensors(given)):
        return forward(*args, **kwargs)
    values = tuple(tuple(tensor.flatten().tolist()) for tensor in _find_tensors(given) if not tensor.is_meta)
    key = layer, torch.get_default_dtype(), tuple(kwargs), _describe_shapes(given), values
    try:
        known = recordings.get(key)
    except TypeError:  # an argument that cannot be a key
        return forward(*args, **kwargs)
    if known:
        return memory.replay(known)
    result, recording = memory.run_recorded(partial(forward, *args, **kwargs))
    recordings.setdefault(key, recording)
    return result
