"""Tools for more rows than fit in memory: mappings on disk, and an ordered map over processes."""

import ctypes
import gc
import os
import signal
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

CACHE_KIB = 1024


class DiskMap:
    """Mapping from strings to strings or integers on disk, which disappears with the process.

    SQLite keeps a database that is opened as "" in an unnamed temporary file (in SQLITE_TMPDIR or TMPDIR), and only its
    cache in memory.
    """

    def __init__(self):
        # a single cursor, because a connection keeps each new cursor for a while
        self._database = sqlite3.connect("", isolation_level=None).cursor()
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE map (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
        self._database.execute("BEGIN")  # never committed, because a commit writes out the cache

    def setdefault(self, key: str, value: str | int) -> str | int:
        """Return the value of `key`, and set it to `value` if it has none."""
        if self._database.execute("INSERT OR IGNORE INTO map VALUES (?, ?)", (key, value)).rowcount:
            return value
        return self.get(key)

    def fill(self, items: Iterable[tuple[str, str | int]]) -> None:
        """Set the values of keys that have none."""
        self._database.executemany("INSERT OR IGNORE INTO map VALUES (?, ?)", items)

    def replace(self, items: Iterable[tuple[str, str | int]]) -> None:
        """Set values, and replace existing ones."""
        self._database.executemany("INSERT OR REPLACE INTO map VALUES (?, ?)", items)

    def add(self, items: Iterable[tuple[str, int]]) -> None:
        """Add to the numbers of keys; a missing number counts as 0."""
        statement = "INSERT INTO map VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = value + excluded.value"
        self._database.executemany(statement, items)

    def get(self, key: str) -> str | int | None:
        row = self._database.execute("SELECT value FROM map WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None


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
