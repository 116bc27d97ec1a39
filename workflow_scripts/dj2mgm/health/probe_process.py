"""Run of a probe in a process of its own, because it may crash, hang or spoil the CUDA state of its process."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from dj2mgm.script_modules import SCRIPTS


@dataclass(frozen=True)
class ProbeOutput:
    """Result of a probe that ran in its own process."""

    values: dict | None  # last line of output; None if the probe failed
    printed: str  # the rest of the output


def run_probe(module: str, limit_s: float, *arguments: str) -> ProbeOutput:
    """Run `python -P -m <module> <arguments>`, whose last line is a JSON object, for at most `limit_s` seconds."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        printed = _decode(error.stdout) + _decode(error.stderr)
        return ProbeOutput(None, f"{printed}\nno answer within {limit_s:.0f} s")
    *lines, last = _decode(result.stdout).splitlines() or [""]
    printed = "\n".join([*lines, _decode(result.stderr)])
    if result.returncode:
        return ProbeOutput(None, f"{printed}{last}\nexit status {result.returncode}")
    return ProbeOutput(json.loads(last), printed)


def _decode(output: bytes | None) -> str:
    return (output or b"").decode("utf-8", errors="replace")
