"""A mapping that lives in a file without a name rather than in memory: for what must be known of every row."""

import sqlite3
from collections.abc import Iterable

CACHE_KIB = 1024


class DiskMap:
    """Maps texts to texts or whole numbers; gone when it is, whatever ends the process.

    SQLite keeps a database that is opened as "" in an unnamed temporary file (in SQLITE_TMPDIR or TMPDIR), and no more
    than its cache in memory.
    """

    def __init__(self):
        self._database = sqlite3.connect("", isolation_level=None)
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

    def get(self, key: str) -> str | int | None:
        row = self._database.execute("SELECT value FROM map WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None
