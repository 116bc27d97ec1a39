"""Live memory and FLOPs of a computation on the meta device.

Every operation runs with its real shapes and without data. A tensor counts from the operation that allocates it until
its last reference is gone, as in PyTorch's allocators. So saved activations, recomputed activations and temporary
tensors are counted as they occur, for every architecture.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def find_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, or in nested lists and tuples. Operations take and return no other containers.

    PyTorch's `tree_leaves` took a third of the time of a trace.
    """
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from find_tensors(value)


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

    def collect_storage_ids(self) -> set[int]:
        """Return the ids of all storages that are counted or excluded."""
        return set(self._storages)

    def sum_sizes(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
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
        """Record this moment under a number that names the event for the caller."""
        self.record()
        self.marks.append((self.count - 1, number))

    def stack_moments(self) -> np.ndarray:
        """Return the live bytes after each allocation, (moments, kinds) int64."""
        return np.vstack(self._moments)

    def get_position(self) -> "Position":
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
