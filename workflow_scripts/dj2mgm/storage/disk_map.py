"""Mappings on disk instead of in memory, for values that are needed for every row."""

import sqlite3
from collections.abc import Iterable

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
