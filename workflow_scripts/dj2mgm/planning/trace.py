"""Traces the live memory and the FLOPs of a computation on the meta device.

- Stand-ins for kernels that only a GPU has.
- `IntegersOnCPU`: shapes that a model computes from integers.
- `LiveMemory`: live bytes after each allocation, and FLOPs.
"""

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.mamba import modeling_mamba

aten = torch.ops.aten

# Stand-ins on the meta device have the shapes of the originals, and save the same tensors for the backward pass.
#
# The originals are PyTorch's FlashAttention (behind SDPA), the code that torch.compile generates for eager attention,
# norms, gated MLPs and the loss, and Mamba's selective scan, whose loop over the sequence would take minutes here.

ATTENTION, MASKED_ATTENTION = "planned", "planned_with_a_mask"
COMPILED_EAGER_ATTENTION = "planned_as_compiled"


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


# Vision-language models compute shapes from integers, such as the number of an image's patches, and token positions.

POSITION_MAKERS = (aten.arange, aten.linspace)  # their results keep values, even if they are fractions
MAX_VALUES = 2**20  # elements of a tensor; numbers per token of a micro batch have fewer
INDEXED = (aten.index, aten.index_put, aten.index_put_)


class IntegersOnCPU(TorchDispatchMode):
    """Mode in which a model on the meta device may compute shapes from integers on the CPU.

    Counts and indices stay on the CPU, with their values. The result of an operation with a meta tensor has no values.

    Args:
        assumptions: assumed values, which the model's code would read from data. For each operation on integers
            without values, a function from the first tensor to the result.
    """

    def __init__(self, assumptions: Mapping[OpOverloadPacket, Callable[[torch.Tensor], torch.Tensor]]):
        super().__init__()
        self.assumptions = assumptions

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args, kwargs, operation = tuple(args), dict(kwargs or {}), function.overloadpacket
        tensors = list(find_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        if any(tensor.is_meta for tensor in tensors):
            if operation in self.assumptions and not tensors[0].is_floating_point():
                return self.assumptions[operation](tensors[0])
            if operation in INDEXED:
                args = (args[0], _masks_to_positions(args[1]), *args[2:])
            if not all(tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map_only(torch.Tensor, _move_to_meta, (args, kwargs))
            device = device and torch.device("meta")
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


def find_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, or in nested lists and tuples. Operations take and return no other containers.

    PyTorch's `tree_leaves` took a third of the time of a trace.
    """
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from find_tensors(value)


def _move_to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _masks_to_positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks by the positions that they select; the number of positions decides the result's shape."""
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
    key = function, torch.get_default_dtype(), describe_shapes(args), describe_shapes(tuple(kwargs.items()))
    if description := _allocations.get(key):
        return make_result(description)
    result = function(*args, **kwargs)
    if key not in _allocations:
        _allocations[key] = describe_result(function, (*args, *kwargs.values()), result)
    return result


def make_result(description: tuple) -> object:
    """Return new tensors of the size, stride and dtype that `describe_result` returned."""
    kind, *parts = description
    results = [
        torch.empty_strided(size, stride, dtype=dtype, device="meta") if dtype else size
        for size, stride, dtype in parts
    ]
    return results[0] if kind is torch.Tensor else kind(results)


def describe_shapes(value: object) -> Hashable:
    """Return the properties of an operation's arguments that decide its allocations."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(describe_shapes, value))
    return type(value), value


def describe_result(function: OpOverload, inputs: object, result: object) -> tuple | None:
    """Return the result's type, and size, stride and dtype of its tensors; None unless all of them are new.

    Attention also returns numbers, which are described as (number, None, None).
    """
    tensors = [result] if isinstance(result, torch.Tensor) else result
    if function._schema.is_mutable or not isinstance(tensors, list | tuple):
        return None
    input_tensors = list(find_tensors(inputs))
    if any(tensor.device.type != "meta" for tensor in input_tensors):  # the result may depend on their values
        return None
    input_storages = {id(tensor.untyped_storage()) for tensor in input_tensors}
    descriptions = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, int):
            descriptions.append((tensor, None, None))
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
            return None
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if (
            id(tensor.untyped_storage()) in input_storages
            or copy.untyped_storage().nbytes() != tensor.untyped_storage().nbytes()
        ):
            return None
        descriptions.append((tensor.shape, tensor.stride(), tensor.dtype))
    kind = torch.Tensor if isinstance(result, torch.Tensor) else type(result)
    return kind, *descriptions


class LiveMemory(TorchDispatchMode):
    """Mode that records, after each allocation, the live bytes by kind; `classify` returns the kind of a new tensor.

    Attributes:
        live: live bytes by kind, (kinds,) int64.
        count: number of recorded moments.
        marks: (moment, number) of each call of `mark`.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    active: "LiveMemory | None" = None  # the mode of the running trace

    def __init__(self, kinds: tuple[str, ...], classify: Callable[[torch.Tensor], str]):
        super().__init__()
        self.kinds = kinds
        self.live = np.zeros(len(kinds), dtype=np.int64)
        self.count = 0
        self.marks: list[tuple[int, int]] = []
        self.flops = 0
        self._classify = classify
        self._storages: dict[int, weakref.ref] = {}
        self._moments: list[np.ndarray] = []  # arrays of (kinds,) or (moments, kinds)

    def __enter__(self) -> "LiveMemory":
        LiveMemory.active = self
        return super().__enter__()

    def __exit__(self, *error) -> None:
        LiveMemory.active = None
        super().__exit__(*error)

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors, such as parameters, which are counted elsewhere."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[id(storage)] = weakref.ref(storage)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are new to this trace as allocated now."""
        for tensor in tensors:
            if id(tensor.untyped_storage()) not in self._storages:
                self._add(tensor)

    def storage_ids(self) -> set[int]:
        """Return the ids of all storages that are counted or excluded."""
        return set(self._storages)

    def sizes(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        """Return the bytes of tensors by kind, (kinds,) int64."""
        sizes = np.zeros(len(self.kinds), dtype=np.int64)
        for tensor in tensors:
            sizes[self.kinds.index(self._classify(tensor))] += tensor.untyped_storage().nbytes()
        return sizes

    def record(self) -> None:
        """Record the live bytes now: tensors may have been freed since the last allocation."""
        self._moments.append(self.live.copy())
        self.count += 1

    def mark(self, number: int) -> None:
        """Record this moment with a number."""
        self.record()
        self.marks.append((self.count - 1, number))

    def moments(self) -> np.ndarray:
        """Return the live bytes after each allocation, (moments, kinds) int64."""
        return np.vstack(self._moments)

    def position(self) -> "Position":
        """Return the position at the end of the records so far."""
        return Position(len(self._moments), self.count, len(self.marks), self.flops, self.live.copy())

    def cut(self, start: "Position") -> "Segment":
        """Return everything that was recorded after a position."""
        moments = self._moments[start.blocks :]
        return Segment(
            np.vstack(moments) - start.live if moments else np.zeros((0, len(self.kinds)), dtype=np.int64),
            [(moment - start.count, number) for moment, number in self.marks[start.marks :]],
            self.flops - start.flops,
        )

    def rewind(self, end: "Position") -> None:
        """Forget everything that was recorded after a position."""
        del self._moments[end.blocks :], self.marks[end.marks :]
        self.count, self.flops = end.count, end.flops

    def replay(self, segment: "Segment") -> None:
        """Record a segment again, in addition to the bytes that are live now."""
        self.marks += [(self.count + moment, number) for moment, number in segment.marks]
        self._moments.append(self.live + segment.moments)
        self.count += len(segment.moments)
        self.flops += segment.flops

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = _run_cached(function, args, kwargs)
        if formula := FLOP_FORMULAS.get(function.overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)
        self.add(find_tensors(result))
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage, kind = tensor.untyped_storage(), self.kinds.index(self._classify(tensor))
        size, key = storage.nbytes(), id(storage)

        def forget(_) -> None:
            self.live[kind] -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, forget)
        self.live[kind] += size
        self.record()


@dataclass(frozen=True)
class Position:
    """Position in the records of a `LiveMemory`."""

    blocks: int
    count: int
    marks: int
    flops: int
    live: np.ndarray  # (kinds,) live bytes


@dataclass(frozen=True)
class Segment:
    """Part of the records of a `LiveMemory`."""

    moments: np.ndarray  # (moments, kinds) live bytes in addition to the bytes at its start
    marks: list[tuple[int, int]]  # (moment, number), with moments counted from its start
    flops: int
