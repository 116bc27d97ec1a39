"""Shapes that vision-language models compute from integers, such as numbers of patches and token positions."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dj2mgm.planning.live_memory import find_tensors

aten = torch.ops.aten
POSITION_MAKERS = (aten.arange, aten.linspace)  # their results keep values, even if they are fractions
MAX_VALUES = 2**20  # elements of a tensor; numbers per token of a micro batch have fewer
INDEX_OPERATORS = (aten.index, aten.index_put, aten.index_put_)


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
