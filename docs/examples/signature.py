"""The failure of a process that has too many files open.

Copied into SYSTEM_SIGNATURES of workflow_scripts/dj2mgm/health/system_failures.py.
"""

from dj2mgm.health.failure_signature import Signature

TOO_MANY_FILES = Signature(
    "Too many open files",  # also the cause of its row in docs/troubleshooting.md
    r"OSError: \[Errno 24\] Too many open files(?:: '(?P<path>[^']*)')?",
    "the process has as many files open as its limit allows; the next one was {path}",
    "raise the limit (`ulimit -n 65536`), or lower loader_workers",
)
