"""What every entry point shares: its flags are paths, and a user's mistake is one line on stderr."""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dj2mgm.errors import InputError


@contextmanager
def project_imports() -> Iterator[None]:
    """Around the imports of a script that people start: where a package is missing, one line says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "dj2mgm":
            raise
        print(
            f"error: the package {package} is not installed for {sys.executable}; activate the project's environment "
            "first: `source .venv/bin/activate` (`make install` creates it)",
            file=sys.stderr,
        )
        sys.exit(2)


def parse_paths(doc: str, *flags: str, optional: Sequence[str] = (), launched: bool = False) -> argparse.Namespace:
    """Parse flags that each take one path; all but the optional ones are required.

    Args:
        doc: the script's docstring, shown by --help.
        launched: whether the deepspeed launcher starts the script; it adds a flag of its own.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(flag, type=Path, required=True)
    for flag in optional:
        parser.add_argument(flag, type=Path)
    if launched:
        parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def escape_control(text: str) -> str:
    """With escapes for what would move a terminal's cursor: ids and paths are somebody else's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def command_line(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap an entry point: an `InputError` becomes one line on stderr and exit status 2."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except InputError as error:
            print(f"error: {escape_control(str(error))}", file=sys.stderr, flush=True)
            sys.exit(2)

    return run
