"""Work on a stream of items in several processes, in their order, without ever holding more than a few of them."""

import ctypes
import gc
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")
AHEAD = 2  # items in work or waiting, for each process

_function: Callable | None = None  # of a worker; it was there when the worker was forked, so that nothing is pickled


def map_in_order(function: Callable[[T], R], items: Iterable[T], processes: int) -> Iterator[R]:
    """As `map`, in `processes` forked processes; in this one if it is one.

    Items and results are pickled, the function is not. An exception in a worker is raised here.
    """
    if processes == 1:
        yield from map(function, items)
        return
    waiting: deque = deque()
    with ProcessPoolExecutor(processes, get_context("fork"), _set_function, (function,)) as pool:
        gc.freeze()  # the collector, here and in the workers, would write to memory that they share, and so copy it
        try:
            for item in items:
                waiting.append(pool.submit(_call, item))
                if len(waiting) == AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            gc.unfreeze()


def end_with_parent() -> None:
    """In a forked process: have Linux kill it when its parent dies, however that dies. A pool's worker would wait for
    ever, and with it whoever reads what it prints."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)


def _set_function(function: Callable) -> None:
    global _function
    _function = function
    end_with_parent()


def _call(item):
    return _function(item)
