"""Log of a stage as plain text, for pattern matching."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
