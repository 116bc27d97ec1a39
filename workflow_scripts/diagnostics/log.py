"""A stage's log as text that patterns can be matched against."""

import re
from dataclasses import dataclass
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HEADING = "diagnosis: "


@dataclass(frozen=True)
class Log:
    path: Path
    text: str  # plain lines: no colours, no overwritten progress bars, no earlier diagnosis

    def line_of(self, position: int) -> int:
        """The number, from 1, of the line that holds this character."""
        return self.text.count("\n", 0, position) + 1

    def last_lines(self, count: int) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()][-count:]


def read_log(path: Path, exit_status: int | None = None) -> Log:
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
    return Log(path, text)
