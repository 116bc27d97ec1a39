"""Errors that a user can mend, and the way every entry point reports them.

An `InputError` is one sentence that says what was wrong, where (file and row, or key) and what to do.
Anything else that escapes is a defect of the workflow and keeps its traceback.
"""

import functools
import sys
from collections.abc import Callable


class InputError(Exception):
    """The input, not the program, is at fault. The message names the place and the remedy."""


def command_line(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap an entry point: an `InputError` becomes one line on stderr and exit status 2."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except InputError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)

    return run
