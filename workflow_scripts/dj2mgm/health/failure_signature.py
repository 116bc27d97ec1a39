"""Signatures of known failures, their explanations, and the log of a stage as plain text."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

# Python prints errors of clean-up code after this heading, and continues.
IGNORED = re.compile(
    r"^.*Exception ignored (?:in|on|while)\b.*\n"
    r"(?:.*Traceback \(most recent call last\):\n(?:(?:\[rank\d+\]: )?[ \t].*\n)*)?"
    r"(?:(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception|Warning|Interrupt)\b.*)?",
    re.MULTILINE,
)
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

    @cached_property
    def ignored_parts(self) -> list[tuple[int, int]]:
        """First and last positions of errors that Python marks as ignored."""
        return [match.span() for match in IGNORED.finditer(self.text)]

    def is_ignored(self, position: int) -> bool:
        return any(start <= position < end for start, end in self.ignored_parts)

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
    """Known failure; `title` is also the cause of its row in docs/troubleshooting.md.

    Attributes:
        pattern: searched in the whole log; ^ and $ match at lines.
        cause: text with the pattern's named groups in braces, with {file} for its `path` or "a file"; or a function
            that returns the explanation, and None if the match is not this failure.
        remedy: text with the same groups.
        symptom: whether it is a consequence of other failures, which counts only without another match.
    """

    title: str
    pattern: str
    cause: str | Callable[[Evidence], Explanation | None]
    remedy: str = ""
    symptom: bool = False

    def explain(self, evidence: Evidence) -> Explanation | None:
        if callable(self.cause):
            return self.cause(evidence)
        groups = evidence.match.groupdict(default="")
        groups = {"file": groups.get("path") or "a file"} | groups
        return Explanation(self.cause.format(**groups), self.remedy.format(**groups))
