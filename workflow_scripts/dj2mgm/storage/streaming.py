"""Tools for more rows than fit in memory: an ordered map over processes."""

import ctypes
import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

# An ordered map over a stream of items in several processes, with few items in memory.

T, R = TypeVar("T"), TypeVar("R")
ITEMS_AHEAD = 2  # items per process that are processed or waiting

_function: Callable | None = None  # a forked worker inherits its function here, because functions may not be picklable


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], processes: int, ahead: int = ITEMS_AHEAD
) -> Iterator[R]:
    """Yield the results of `map(function, items)`, computed in `processes` forked processes, or in this one for 1.

    Items and results are pickled, but not the function. An exception in a worker is raised here. At most `ahead` items
    per process are processed or waiting.
    """
    if processes == 1:
        yield from map(function, items)
        return
    futures: deque = deque()
    with ProcessPoolExecutor(processes, get_context("fork"), _start, (function, os.getpid())) as pool:
        gc.freeze()  # otherwise the garbage collectors write to shared memory pages, which are then copied
        try:
            for item in items:
                futures.append(pool.submit(_call, item))
                if len(futures) == ahead * processes:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            # With wait=False, not even the `with` waits, and Python's exit could write to a pipe that is being closed.
            pool.shutdown(cancel_futures=True)
            gc.unfreeze()


def end_with_parent(parent: int | None = None) -> None:
    """Let Linux kill this forked process when its parent dies.

    Otherwise a pool's worker would wait forever, and so would a reader of its output. A parent that is already dead
    sends no signal, so its process id is compared if it is known.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


def _start(function: Callable, parent: int) -> None:
    global _function
    end_with_parent(parent)
    _function = function


def _call(item):
    return _function(item)
