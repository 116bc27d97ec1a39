"""A stage's log as text, and what a known failure looks like in it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# A stage's log as text that patterns can be matched against.

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HEADING = "diagnosis: "


@dataclass(frozen=True)
class StageLog:
    path: Path
    text: str  # plain lines: no colors, no overwritten progress bars, no earlier diagnosis

    def line_of(self, position: int) -> int:
        """The number, from 1, of the line that holds this character."""
        return self.text.count("\n", 0, position) + 1

    def last_lines(self, count: int) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()][-count:]


def read_log(path: Path, exit_status: int | None = None) -> StageLog:
    """
    Args:
        exit_status: of the command that wrote the log. It becomes the last line, because the shell's word that a
            command was killed is in no log.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    text = ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = re.split(f"^{HEADING}", text, maxsplit=1, flags=re.MULTILINE)[0]
    if exit_status is not None:
        text = f"{text.rstrip()}\nexit status {exit_status}\n"
    return StageLog(path, text)


# What a known failure looks like in a log, and what is to be said about it.


class Explanation(NamedTuple):
    cause: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """A place in a log where a signature's pattern matched."""

    log: StageLog
    match: re.Match

    @property
    def line(self) -> str:
        """The whole line, or lines, of the match."""
        text, start = self.log.text, self.log.text.rfind("\n", 0, self.match.start()) + 1
        end = text.find("\n", self.match.end())
        return text[start : end if end >= 0 else None]

    @property
    def before(self) -> str:
        return self.log.text[: self.match.start()]


@dataclass(frozen=True)
class Signature:
    """One failure. `title` is also its section in docs/troubleshooting.md."""

    title: str
    pattern: str  # searched in the whole log; ^ and $ are those of a line
    explain: Callable[[Evidence], Explanation | None]  # None: on a closer look it is something else
    symptom: bool = False  # a consequence of other failures: it counts only where nothing else is found


def fixed_explanation(cause: str, remedy: str) -> Callable[[Evidence], Explanation]:
    """The same words each time; {name} stands for a named group of the pattern."""

    def explain(evidence: Evidence) -> Explanation:
        groups = evidence.match.groupdict(default="")
        return Explanation(cause.format(**groups), remedy.format(**groups))

    return explain
