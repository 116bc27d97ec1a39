"""Results of the doctor's checks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    status: Literal["pass", "warn", "fail", "skip"]  # skip: the check does not apply
    reason: str
    remedy: str = ""  # the command that fixes the problem, or an instruction
