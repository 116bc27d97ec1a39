"""What a stage tells a person: notes, warnings and progress. Each is one line of its log, with a mark at its start.

The console (console.py) shows the marked lines while a stage runs. Everything else that a stage or a library prints is
in the log only.
"""

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TypeVar

NOTE, WARNING, PROGRESS = "note: ", "warning: ", "progress: "
INTERVAL_S = 10.0

T = TypeVar("T")


def note(sentence: str) -> None:
    """Something a person should know and need not act on, such as where a stage goes on after a kill."""
    _print(f"{NOTE}{sentence}")


def warn(sentence: str) -> None:
    """Something a person may want to act on, although the stage goes on."""
    _print(f"{WARNING}{sentence}")


def report_progress(what: str, done: int, total: int, detail: str, seconds_left: float) -> None:
    """One line, such as `progress: steps: 20 of 135, loss 0.8039, 2 min 37 s left`."""
    _print(f"{PROGRESS}{what}: {done} of {total}, {detail}, {_time_left(seconds_left)} left")


class Progress:
    """Reports how many of `total` items a loop has done: every ten seconds, and when it is done.

    Args:
        what: the items, in the plural.
    """

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = 0
        self.started = self.reported = monotonic()

    def add(self, count: int = 1, detail: str = "") -> None:
        """Count items that are done. `detail` replaces the rate, which is that of the whole loop so far."""
        self.done += count
        now = monotonic()
        if now - self.reported >= INTERVAL_S or self.done == self.total:
            self.reported = now
            rate = self.done / max(now - self.started, 1e-6)
            detail = detail or f"{rate:.1f} per second"
            report_progress(self.what, self.done, self.total, detail, (self.total - self.done) / rate)

    def follow(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; each counts when the next one is asked for."""
        for item in items:
            yield item
            self.add()


def format_duration(seconds: float) -> str:
    """3725 → "1 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _time_left(seconds: float) -> str:
    """As `duration`, in whole seconds: an estimate has no tenths."""
    return f"{seconds:.0f} s" if seconds < 59.5 else format_duration(seconds)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
