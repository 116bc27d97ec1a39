"""What a known failure looks like in a log, and what is to be said about it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diagnostics.log import Log


class Explanation(NamedTuple):
    cause: str
    remedy: str


@dataclass(frozen=True)
class Found:
    """A place in a log where a signature's pattern matched."""

    log: Log
    match: re.Match

    @property
    def before(self) -> str:
        return self.log.text[: self.match.start()]


@dataclass(frozen=True)
class Signature:
    """One failure. `title` is also its section in docs/troubleshooting.md."""

    title: str
    pattern: str  # searched in the whole log; ^ and $ are those of a line
    explain: Callable[[Found], Explanation | None]  # None: on a closer look it is something else
    symptom: bool = False  # other failures drag it behind them: it counts only where nothing else is found


def says(cause: str, remedy: str) -> Callable[[Found], Explanation]:
    """The same words each time; {name} stands for a named group of the pattern."""

    def explain(found: Found) -> Explanation:
        groups = found.match.groupdict(default="")
        return Explanation(cause.format(**groups), remedy.format(**groups))

    return explain
