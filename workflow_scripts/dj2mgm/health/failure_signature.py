"""Signatures of known failures, and their explanations."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dj2mgm.health.log_text import StageLog


class Explanation(NamedTuple):
    """Cause and remedy of a failure."""

    cause: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """Match of a signature's pattern in a log."""

    log: StageLog
    match: re.Match

    @property
    def line(self) -> str:
        """Complete line or lines of the match."""
        text, start = self.log.text, self.log.text.rfind("\n", 0, self.match.start()) + 1
        end = text.find("\n", self.match.end())
        return text[start : end if end >= 0 else None]

    @property
    def before(self) -> str:
        return self.log.text[: self.match.start()]


@dataclass(frozen=True)
class Signature:
    """Known failure; `title` is also the cause of its row in docs/troubleshooting.md."""

    title: str
    pattern: str  # searched in the whole log; ^ and $ match at lines
    explain: Callable[[Evidence], Explanation | None]  # None: the match is not this failure
    symptom: bool = False  # a consequence of other failures; counts only without another match


def make_fixed_explanation(cause: str, remedy: str) -> Callable[[Evidence], Explanation]:
    """Return a function that fills named groups of the pattern into fixed texts."""

    def explain(evidence: Evidence) -> Explanation:
        groups = evidence.match.groupdict(default="")
        return Explanation(cause.format(**groups), remedy.format(**groups))

    return explain
