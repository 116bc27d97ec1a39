"""The failure of a program that serves a network folder, such as sshfs or s3fs.

Copied into SYSTEM_SIGNATURES of workflow_scripts/dj2mgm/health/system_failures.py.
"""

from dj2mgm.health.failure_signature import Signature

UNMOUNTED_FOLDER = Signature(
    "A network folder was unmounted",  # also the cause of its row in docs/troubleshooting.md
    r"OSError: \[Errno 107\] Transport endpoint is not connected(?:: '(?P<path>[^']*)')?",
    "the program that serves a network folder ended, so {file} could not be read or written",
    "unmount the folder (`fusermount -u <folder>`), mount it again, and run the same command again",
)
