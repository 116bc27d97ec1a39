"""Arrays that other processes fill in shared memory, in order."""

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from dj2mgm.storage.streaming import ITEMS_AHEAD, map_in_order

T = TypeVar("T")


def fill_in_order(
    fill: Callable[[T, np.ndarray], None], items: Iterable[T], processes: int, like: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield an array for each item, which `fill(item, array)` wrote in one of `processes` forked processes.

    The arrays are shared memory, so no results are pickled. It is anonymous, because containers limit /dev/shm. An
    array is valid until the next one is requested.

    Args:
        like: an array of the shape and type of all results.
    """
    count = ITEMS_AHEAD * processes  # `map_in_order` has at most this many items that are processed or waiting
    shared = np.frombuffer(mmap.mmap(-1, count * like.nbytes), like.dtype).reshape(count, *like.shape)

    def run(numbered: tuple[int, T]) -> None:
        number, item = numbered
        fill(item, shared[number % count])

    for number, _ in enumerate(map_in_order(run, enumerate(items), processes)):
        yield shared[number % count]
