"""Log of a stage as plain text, and signatures of known failures."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# A stage's log as plain text, for pattern matching.

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HEADING = "diagnosis: "


@dataclass(frozen=True)
class StageLog:
    """Log of a stage without terminal control sequences."""

    path: Path
    text: str  # plain lines: no colors, no overwritten progress bars, no earlier diagnosis

    def find_line_number(self, position: int) -> int:
        """Return the number of the line that holds this character, counted from 1."""
        return self.text.count("\n", 0, position) + 1

    def list_last_lines(self, count: int) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()][-count:]


def read_log(path: Path, exit_status: int | None = None) -> StageLog:
    """Return a log, empty if it is missing, without colors, progress bars and earlier diagnoses.

    The exit status of the command that wrote the log is appended as the last line, because no log contains the shell's
    message that a command was killed.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    text = ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = re.split(f"^{HEADING}", text, maxsplit=1, flags=re.MULTILINE)[0]
    if exit_status is not None:
        text = f"{text.rstrip()}\nexit status {exit_status}\n"
    return StageLog(path, text)


# Signatures of known failures and their explanations.


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
    """Known failure; `title` is also its section in docs/troubleshooting.md."""

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
