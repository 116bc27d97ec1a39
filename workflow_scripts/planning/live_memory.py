"""How much memory a computation holds from moment to moment, and its FLOPs, counted while it runs on the meta device.

Every operation runs with its real shapes and without data. A tensor counts from the operation that allocates it until
nobody refers to it any more, which is what PyTorch's allocators see; so saved activations, what a backward pass
recomputes, and the temporaries in between are all counted as they occur, whatever the architecture.
"""

import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Attention's own: torch 2.6 counts no heads that share keys and values.
FLOPS_OF = flop_registry | {
    aten._scaled_dot_product_flash_attention: lambda query, key, *_, **__: 4 * query.numel() * key.shape[-2],
    aten._scaled_dot_product_flash_attention_backward: lambda _, query, key, *__, **___: (
        10 * query.numel() * key.shape[-2]
    ),
}


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
        result = function(*args, **kwargs)
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
