"""Notes, warnings and progress of a stage, each printed as one marked line of its log.

The console (console.py) shows the marked lines while a stage runs. All other output of stages and libraries is only in
the log.
"""

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TypeVar

from dj2mgm.errors import shorten_words
from dj2mgm.torch_environment import is_first_here

NOTE, WARNING, PROGRESS = "note: ", "warning: ", "progress: "
INTERVAL_S = 10.0

T = TypeVar("T")


def note(sentence: str) -> None:
    """Print a note that needs no action, such as the step at which a stage continues after a kill."""
    _print(f"{NOTE}{sentence}")


def warn(sentence: str) -> None:
    """Print a warning that may need action, although the stage continues."""
    _print(f"{WARNING}{sentence}")


def report_progress(what: str, done: int, total: int, detail: str, seconds_left: float) -> None:
    """Print a line such as `progress: 2 min 37 s left, 20 of 135 steps, loss 0.8039`.

    The time is first, because terminals cut off the end of long lines. The last line has none.
    """
    time_left = f"{_format_time_left(seconds_left)} left, " if done < total else ""
    _print(f"{PROGRESS}{time_left}{done:,} of {total:,} {what}, {detail}")


def report_activity(activity: str) -> None:
    """Print a line such as `progress: compiling cpu_adam …`, once on a node; the console adds its seconds."""
    if is_first_here():
        _print(f"{PROGRESS}{activity} …")


class Progress:
    """Progress of a loop over items (`what`, in the plural), reported every ten seconds, and at a long one's end."""

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = 0
        self.started = self.reported = monotonic()

    def add(self, count: int = 1, detail: str = "") -> None:
        """Count finished items; `detail` replaces the average rate of the loop."""
        self.done += count
        now = monotonic()
        if now - self.reported >= INTERVAL_S or (self.done == self.total and now - self.started >= INTERVAL_S):
            self.reported = now
            rate = self.done / max(now - self.started, 1e-6)
            detail = detail or f"{rate:.1f} per second"
            report_progress(self.what, self.done, self.total, detail, (self.total - self.done) / rate)

    def follow(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; each is counted when the next one is requested."""
        for item in items:
            yield item
            self.add()


def format_duration(seconds: float) -> str:
    """Format seconds, such as 3725 as "1 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _format_time_left(seconds: float) -> str:
    """Format an estimate as `format_duration` does, but without tenths."""
    return f"{seconds:.0f} s" if seconds < 59.5 else format_duration(seconds)


def _print(line: str) -> None:
    print(shorten_words(line), file=sys.stderr, flush=True)
