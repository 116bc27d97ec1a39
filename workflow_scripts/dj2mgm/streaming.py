"""More rows than fit in memory: processes that share the work in order, and mappings in a file."""

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

# Work on a stream of items in several processes, in their order, without ever holding more than a few of them.

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
    with ProcessPoolExecutor(processes, get_context("fork"), _start, (function, os.getpid())) as pool:
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


def end_with_parent(parent: int | None = None) -> None:
    """In a forked process: have Linux kill it when its parent dies, however that dies. A pool's worker would wait for
    ever, and with it whoever reads what it prints.

    Args:
        parent: its process id, where it is known: one that is dead already sends no signal.
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


# A mapping that lives in a file without a name rather than in memory: for what must be known of every row.

CACHE_KIB = 1024


class DiskMap:
    """Maps texts to texts or whole numbers; gone when it is, whatever ends the process.

    SQLite keeps a database that is opened as "" in an unnamed temporary file (in SQLITE_TMPDIR or TMPDIR), and no more
    than its cache in memory.
    """

    def __init__(self):
        # one cursor: a connection remembers each that it makes for a while
        self._database = sqlite3.connect("", isolation_level=None).cursor()
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE map (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
        self._database.execute("BEGIN")  # never committed: a commit writes the cache out

    def setdefault(self, key: str, value: str | int) -> str | int:
        """The value of `key`, which is `value` if it had none."""
        if self._database.execute("INSERT OR IGNORE INTO map VALUES (?, ?)", (key, value)).rowcount:
            return value
        return self.get(key)

    def fill(self, items: Iterable[tuple[str, str | int]]) -> None:
        """`setdefault` of many."""
        self._database.executemany("INSERT OR IGNORE INTO map VALUES (?, ?)", items)

    def replace(self, items: Iterable[tuple[str, str | int]]) -> None:
        """Set values, whether or not their keys had some."""
        self._database.executemany("INSERT OR REPLACE INTO map VALUES (?, ?)", items)

    def add(self, items: Iterable[tuple[str, int]]) -> None:
        """Add to the numbers of keys, from 0 for those that had none."""
        statement = "INSERT INTO map VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = value + excluded.value"
        self._database.executemany(statement, items)

    def get(self, key: str) -> str | int | None:
        row = self._database.execute("SELECT value FROM map WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None
