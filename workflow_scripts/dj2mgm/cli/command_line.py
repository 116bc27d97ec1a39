"""Shared command-line handling of the scripts: path flags, quiet libraries, and a user's mistake as one line.

The switches of libraries are environment variables, because most of their messages are printed on import. Snakemake
sets them for all jobs; a stage that is run by hand prints everything. Scripts whose output a person reads silence all
but errors.
"""

import argparse
import errno
import functools
import gc
import logging
import os
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from dj2mgm.errors import InputError
from dj2mgm.torch_environment import set_torch_environment

SWITCHES = {
    # deprecations between libraries, which only their authors can resolve
    "PYTHONWARNINGS": "ignore:`is_gradient_checkpointing`:FutureWarning,ignore:`torch.distributed.:FutureWarning",
    "TORCH_LOGS": "-torch.utils._pytree",  # torchao registers enums in a deprecated way
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a warning that a loopback address has no host name
    "ACCELERATE_LOG_LEVEL": "ERROR",  # a message that DeepSpeed's gradient accumulation is used, as intended
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # progress bars of loading and writing weights
}


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Switch off warnings and progress bars of libraries, which are imported or used inside the context."""
    os.environ.update(SWITCHES | os.environ)  # the user's own values come first
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


@contextmanager
def project_imports() -> Iterator[None]:
    """Set PyTorch's environment, and turn a missing package in a script's imports into one line with the remedy.

    Python's garbage collector is off during the imports. They leave no garbage, and it would take a sixth of the time.
    Later collections skip the imported objects.
    """
    set_torch_environment()
    collects = gc.isenabled()
    gc.disable()
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
    finally:
        if collects:
            gc.freeze()
            gc.enable()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Let libraries print only errors during the imports of a script with `quiet_command_line`.

    Stages do not use it, because their logs keep all that libraries print.
    """
    with silence_libraries(), project_imports():
        yield


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose --help shows the script's docstring unchanged."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_paths(
    doc: str, *flags: str, optional: Sequence[str] = (), lists: Sequence[str] = (), launched: bool = False
) -> argparse.Namespace:
    """Parse flags that each take one path, those in `lists` several; flags in `optional` may be missing.

    Args:
        doc: the script's docstring, shown by --help.
        launched: whether the deepspeed launcher starts the script; it adds a flag.
    """
    parser = make_parser(doc)
    for flag in flags:
        parser.add_argument(flag, type=Path, required=True)
    for flag in optional:
        parser.add_argument(flag, type=Path)
    for flag in lists:
        parser.add_argument(flag, type=Path, nargs="+", required=True)
    if launched:
        parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def escape_control(text: str) -> str:
    """Escape control characters; ids and paths are untrusted input."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


SAFE_PATH = "PYTHONSAFEPATH"
REMEDIES = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full disk, exceeded quota, too large file
    "Free space or raise the limit, and run the same command again",
) | {
    errno.EACCES: "Give this user access to it, or name another path",
    errno.EPERM: "Give this user access to it, or name another path",
    errno.EROFS: "Name a folder on another file system, or mount this one for writing",
}


def describe_system_error(error: OSError) -> str | None:
    """Return a sentence with the file and the remedy; None if the error is not one of `REMEDIES`."""
    if error.errno not in REMEDIES:
        return None
    file_note = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    return f"{error.strerror}{file_note}. {REMEDIES[error.errno]}"


def command_line(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap an entry point; an `InputError` or a file without access becomes one line on stderr and exit status 2."""

    @functools.wraps(main)
    def run() -> None:
        set_torch_environment()  # for scripts that import PyTorch later
        try:
            if os.path.expanduser("~") == "~":
                raise InputError("HOME is not set, and this user has no home folder. Set HOME to a writable folder")
            with _safe_children():
                main()
        except InputError as error:
            _fail(str(error))
        except OSError as error:
            if not (sentence := describe_system_error(error)):
                raise
            _fail(sentence)
        except sqlite3.OperationalError as error:  # mappings on disk (streaming.py)
            if "disk is full" not in str(error):
                raise
            _fail(f"{error}. Free space in {tempfile.gettempdir()}, or let TMPDIR name another folder")

    return run


@contextmanager
def _safe_children() -> Iterator[None]:
    """Keep the working folder out of the imports of Python processes that libraries start, such as spawned workers."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        if before is not None:
            os.environ[SAFE_PATH] = before


def _fail(message: str) -> NoReturn:
    print(f"error: {escape_control(message)}", file=sys.stderr, flush=True)
    sys.exit(2)


def restart_process() -> NoReturn:
    """Replace this process by a new one with the same command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.pop(SAFE_PATH, None)  # the script imports modules from its folder
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def quiet_command_line(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap an entry point as `command_line` does; libraries print errors only."""

    @functools.wraps(main)
    def run() -> None:
        with silence_libraries():
            command_line(main)()

    return run
