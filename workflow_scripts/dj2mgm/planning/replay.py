"""Replay of equal parts in a trace: the first one of each kind is recorded, and the others repeat its memory.

- Frozen layers of image encoders save nothing for the backward pass. The first one is recorded while it runs.
- Layers whose input needs a gradient save tensors between both passes. Their recording is a forward and a backward pass
  of the layer alone.
- Chunks of the loss are equal from the second one on.

These parts take most of the time of a trace.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from dj2mgm.models import loss
from dj2mgm.planning.live_memory import (
    LiveMemory,
    Position,
    Segment,
    describe_result,
    describe_shapes,
    find_tensors,
    make_result,
)


@dataclass(frozen=True)
class FrozenRecording:
    """Memory and FLOPs of a layer that saves nothing, and a description of its result."""

    forward: Segment
    result: tuple


@dataclass(frozen=True)
class Recording:
    """Memory and FLOPs of both passes of a layer, and descriptions of its result and of its input's gradient."""

    forward: Segment
    result: tuple
    backward: Segment
    gradient: tuple
    saved_bytes: np.ndarray  # (kinds,) bytes that live until the backward pass, without the bytes of arguments
    saved_arguments: tuple[bool, ...]  # whether each tensor among the arguments lives until the backward pass


_digests = WeakIdKeyDictionary()  # by tensor: version and digest of its values


def replay_layers(model: nn.Module) -> None:
    """Let equal layers run once for equal inputs, and replay the memory of this run in later runs."""
    recordings: dict[Hashable, Recording | FrozenRecording | None] = {}
    inner_modules: set[nn.Module] = set()
    for parts in model.modules():
        for layer in parts if isinstance(parts, nn.ModuleList) else ():
            layer.forward = partial(_ReplayedLayer(layer, recordings, layer in inner_modules).run, layer.forward)
            inner_modules.update(layer.modules())


@contextmanager
def replay_chunks() -> Iterator[None]:
    """Let a traced loss (loss.py) run two chunks, and count the FLOPs of the others, inside the context.

    Of three or more chunks, the second needs the most memory: it is a whole chunk, and the gradient of the first is
    still there.
    """

    def split_rows(number: int) -> Iterator[slice]:
        first, *others = original(number)
        yield first
        if LiveMemory.active is None or len(others) < 2:
            yield from others
            return
        before = LiveMemory.active.flops
        yield others[0]
        flops = LiveMemory.active.flops - before
        LiveMemory.active.flops += flops * (number - 2 * loss.ROWS_AT_ONCE) // loss.ROWS_AT_ONCE

    original = loss.split_rows
    loss.split_rows = split_rows
    try:
        yield
    finally:
        loss.split_rows = original


class _ReplayedLayer:
    """A layer that runs only if no equal layer ran with equal inputs before.

    Args:
        recordings: recordings of all layers of the model; None for a layer that cannot be recorded.
        is_inner: whether the layer is part of another layer. Its backward pass is then recorded with the outer layer,
            not on its own.
    """

    def __init__(
        self, layer: nn.Module, recordings: dict[Hashable, Recording | FrozenRecording | None], is_inner: bool
    ):
        parameters = list(layer.parameters())
        self.kind = repr(layer), tuple((parameter.shape, parameter.requires_grad) for parameter in parameters)
        self.is_frozen = not any(parameter.requires_grad for parameter in parameters)
        self.recordings, self.is_inner = recordings, is_inner
        self.modules = list(layer.modules())

    def run(self, forward: Callable, *args, **kwargs) -> object:
        memory, tensors = LiveMemory.active, list(find_tensors((*args, *kwargs.values())))
        differentiable = sum(tensor.requires_grad for tensor in tensors)
        if memory is not None and self.is_frozen and not differentiable:
            return self._run_frozen(memory, partial(forward, *args, **kwargs), self._make_key(args, kwargs, tensors))
        if memory is None or self.is_inner or differentiable != 1 or self._has_state():
            return forward(*args, **kwargs)
        key = self._make_key(args, kwargs, tensors)
        if not _is_hashable(key):
            return forward(*args, **kwargs)
        if key not in self.recordings:
            self.recordings[key] = _LayerAlone(memory).record(forward, args, kwargs)
        recording = self.recordings[key]
        return _Replay.apply(memory, recording, *tensors) if recording else forward(*args, **kwargs)

    def _make_key(self, args: tuple, kwargs: dict, tensors: Sequence[torch.Tensor]) -> Hashable:
        """Return a key of everything that the memory of a run depends on."""
        checkpointed = tuple(getattr(module, "gradient_checkpointing", None) for module in self.modules)
        values = tuple(self._compute_digest(tensor) for tensor in tensors if not tensor.is_meta)
        differentiable = tuple(tensor.requires_grad for tensor in tensors)
        arguments = describe_shapes((*args, *kwargs.values()))
        return self.kind, checkpointed, torch.get_default_dtype(), tuple(kwargs), arguments, differentiable, values

    def _compute_digest(self, tensor: torch.Tensor) -> tuple[int, bytes]:
        """Return a digest of a tensor's values, once for all layers: a mask may have millions."""
        version, digest = _digests.get(tensor, (None, None))
        if version != tensor._version:
            digest = sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).digest()
            _digests[tensor] = tensor._version, digest
        return digest

    def _has_state(self) -> bool:
        """Return whether the layer reads tensors that are neither arguments nor parameters."""
        return any(type(value) is torch.Tensor for module in self.modules for value in vars(module).values())

    def _run_frozen(self, memory: LiveMemory, run: Callable[[], object], key: Hashable) -> object:
        if not _is_hashable(key):
            return run()
        if recording := self.recordings.get(key):
            memory.replay(recording.forward)
            return make_result(recording.result)  # adds moments that need no more memory than the layer's own moments
        start, storage_ids = memory.get_position(), memory.collect_storage_ids()
        result = run()
        outputs = list(find_tensors(result))
        is_new = {id(output.untyped_storage()) for output in outputs}.isdisjoint(storage_ids)
        freed = memory.live - start.live - memory.sum_sizes(outputs)
        description = describe_result(torch.ops.aten.empty.memory_format, (), result)
        is_recordable = description is not None and is_new and not freed.any()
        self.recordings.setdefault(key, FrozenRecording(memory.cut(start), description) if is_recordable else None)
        return result


def _is_hashable(key: Hashable) -> bool:
    """Return whether a key can be used; arguments of other types than tensors may not be hashable."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


class _Replay(torch.autograd.Function):
    """A layer's result without the layer: both passes record its memory again."""

    @staticmethod
    def forward(ctx, memory: LiveMemory, recording: Recording, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.memory, ctx.recording = memory, recording
        ctx.save_for_backward(
            *(tensor for tensor, is_saved in zip(tensors, recording.saved_arguments, strict=True) if is_saved)
        )
        memory.replay(recording.forward)
        memory.live += recording.saved_bytes
        return make_result(recording.result)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        ctx.memory.replay(ctx.recording.backward)
        ctx.memory.live -= ctx.recording.saved_bytes
        result = make_result(ctx.recording.gradient)
        return tuple(result if needed else None for needed in ctx.needs_input_grad)


class _LayerAlone:
    """A forward and a backward pass of a layer without the layers around it."""

    def __init__(self, memory: LiveMemory):
        self.memory = memory
        self.start: Position | None = None  # start of the backward pass
        self.backward: Segment | None = None
        self.gradient: tuple | None = None  # description of the input's gradient
        self.change = np.zeros_like(memory.live)  # bytes at the end of the backward pass, without its arguments

    def record(self, forward: Callable, args: tuple, kwargs: dict) -> Recording | None:
        """Run both passes and return their recording; None if the layer saves more than its backward pass frees."""
        position = self.memory.get_position()
        recording = self._record_passes(forward, args, kwargs)
        self.memory.rewind(position)
        return recording if (self.memory.live == position.live).all() else None

    def _record_passes(self, forward: Callable, args: tuple, kwargs: dict) -> Recording | None:
        """Record both passes of a layer alone; None if a replay could not repeat their memory or their result."""
        memory = self.memory
        args, kwargs = self._copy(args, kwargs)
        copies = list(find_tensors((*args, *kwargs.values())))
        is_input = [copy.requires_grad for copy in copies]
        storages = [weakref.ref(copy.untyped_storage()) for copy in copies]
        [input_size] = [memory.sum_sizes([copy]) for copy in copies if copy.requires_grad]
        start = memory.get_position()
        result = forward(*args, **kwargs)
        description = describe_result(torch.ops.aten.empty.memory_format, (), result)
        if not isinstance(result, torch.Tensor) or not result.requires_grad or description is None:
            return None
        forward_pass, saved_bytes = memory.cut(start), memory.live - start.live - memory.sum_sizes([result])
        del args, kwargs, copies
        # Saved arguments are still alive. Arguments that all layers share live until the last layer is done.
        saved_arguments = [storage() is not None for storage in storages]
        shared_storages = [storage() for storage, is_own in zip(storages, is_input, strict=True) if not is_own]
        result_storage = weakref.ref(result.untyped_storage())
        end = _Output.apply(result, self, description)
        del result
        if result_storage() is not None:
            return None
        torch.autograd.backward([end], [end.new_empty(0)])
        del shared_storages
        input_is_saved = any(is_saved for is_saved, is_own in zip(saved_arguments, is_input, strict=True) if is_own)
        if self.gradient is None or (self.change + saved_bytes + input_size * input_is_saved).any():
            return None
        return Recording(forward_pass, description, self.backward, self.gradient, saved_bytes, tuple(saved_arguments))

    def _copy(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments with new tensors, whose lifetime shows which of them the layer saves."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                return _Input.apply(tensor.new_empty(0).requires_grad_(), self, tensor.detach())
            return tensor.new_empty_strided(tensor.shape, tensor.stride()) if tensor.is_meta else tensor.clone()

        return tree_map_only(torch.Tensor, copy, (args, kwargs))


class _Input(torch.autograd.Function):
    """The input of a layer alone. Its gradient ends the backward pass."""

    @staticmethod
    def forward(ctx, source: torch.Tensor, alone: _LayerAlone, like: torch.Tensor) -> torch.Tensor:
        ctx.alone = alone
        return like.new_empty_strided(like.shape, like.stride())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        alone, memory = ctx.alone, ctx.alone.memory
        alone.backward = memory.cut(alone.start)
        alone.gradient = describe_result(torch.ops.aten.empty.memory_format, (), gradient)
        alone.change += memory.live - alone.start.live - memory.sum_sizes([gradient])
        return None, None, None


class _Output(torch.autograd.Function):
    """The result of a layer alone, without its elements. Its gradient starts the backward pass."""

    @staticmethod
    def forward(ctx, result: torch.Tensor, alone: _LayerAlone, description: tuple) -> torch.Tensor:
        ctx.alone, ctx.description = alone, description
        return result.new_empty(0)

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple:
        gradient = make_result(ctx.description)
        ctx.alone.start = ctx.alone.memory.get_position()
        ctx.alone.change += ctx.alone.memory.sum_sizes([gradient])
        return gradient, None, None
