"""A script's `main` in the tests' own process."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Outcome:
    """Exit status and output of a run."""

    status: int
    stdout: str
    stderr: str


def run_main(script: ModuleType, *arguments: str, capture: pytest.CaptureFixture) -> Outcome:
    """Run a script with these arguments; `capture` is pytest's capsys, or capfd if the script starts processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
        status = 0
        try:
            script.main()
        except SystemExit as end:
            status = end.code
    return Outcome(status, *capture.readouterr())
