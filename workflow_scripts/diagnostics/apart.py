"""Probes that may crash, hang or spoil a process's CUDA state run in a process of their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    values: dict | None  # what the probe found; None: it failed
    printed: str  # everything else that it printed


def run_apart(module: str, limit_s: float) -> Outcome:
    """Run `python -m <module>`, whose last line on stdout is a JSON object, for at most `limit_s` seconds."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        printed = _text(error.stdout) + _text(error.stderr)
        return Outcome(None, f"{printed}\nno answer within {limit_s:.0f} s")
    *lines, last = _text(done.stdout).splitlines() or [""]
    printed = "\n".join([*lines, _text(done.stderr)])
    if done.returncode:
        return Outcome(None, f"{printed}{last}\nexit status {done.returncode}")
    return Outcome(json.loads(last), printed)


def _text(output: bytes | None) -> str:
    return (output or b"").decode("utf-8", errors="replace")
