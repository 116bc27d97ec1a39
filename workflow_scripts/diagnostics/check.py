"""What a check of this machine found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    name: str
    status: Literal["pass", "warn", "fail", "skip"]  # skip: does not apply here
    reason: str
    remedy: str = ""  # the command that mends it, or what to do
