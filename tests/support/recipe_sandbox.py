"""Run operators of recipes as an unprivileged user, and record their accesses outside of their folder.

    python recipe_sandbox.py <folder> < cases.json > findings.jsonl

The folder contains `work/` (rows, images, models, outputs), which operators may change, and `decoys/`, which they must
not change. As root, the process drops every privilege except reading, so that it can still import modules. It then
owns `work/` and `decoys/`, so that it could delete a decoy. Python's audit events record all attempts.
"""

import ctypes
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

NOBODY = 65534
KEEP_CAPABILITIES, VERSION_3, READ_ANYTHING = 8, 0x20080522, 1 << 2
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Recorder:
    """An audit hook that records attempts outside of a folder while `is_on`."""

    def __init__(self, work: Path, decoys: Path):
        self.work, self.decoys = str(work.resolve()), str(decoys.resolve())
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._record)

    def _record(self, event: str, arguments: tuple) -> None:
        if self.is_on and self._is_outside(event, arguments):
            self.is_on = False  # resolving its name may open files
            self.events.append(f"{event} {arguments!r}"[:300])
            self.is_on = True

    def _is_outside(self, event: str, arguments: tuple) -> bool:
        if event in CONNECTS:
            return not (event == "socket.connect" and arguments[0].family == socket.AF_UNIX)
        if event in STARTS:
            return True
        if event in CHANGES:
            return any(self._is_outside_work(path) for path in arguments if isinstance(path, str | bytes))
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int):
                return False
            writes = isinstance(flags, int) and flags & WRITING or isinstance(mode, str) and set(mode) & set("wax+")
            return bool(writes and self._is_outside_work(path)) or self._is_decoy(path)
        return False

    def _is_outside_work(self, path: str | bytes) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        return not real.startswith(f"{self.work}/") and real not in ("/dev/null", self.work)

    def _is_decoy(self, path: str | bytes) -> bool:
        return os.path.realpath(os.fsdecode(path)).startswith(self.decoys)


def give_up_rights(*folders: Path) -> None:
    """Become an unprivileged user who owns the folders and can read everything; do nothing for an ordinary user."""
    if os.getuid() != 0:
        return
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(READ_ANYTHING, READ_ANYTHING, 0, 0, 0, 0)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def read_state(folder: Path) -> dict[str, str]:
    """Return type, time and digest of each entry of a folder."""
    state = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        state[str(path)] = f"{path.lstat().st_mode} {path.lstat().st_mtime_ns} {hashlib.sha256(content).hexdigest()}"
    return state


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    work, decoys = folder / "work", folder / "decoys"
    cases = json.load(sys.stdin)
    findings = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.chdir(work)
    if (work / "clip").is_dir():
        import torch  # noqa: F401  (before privileges are dropped, because it compiles and caches at import)
    from loguru import logger

    from dj2mgm.data.chat_template import render_chat
    from dj2mgm.errors import InputError
    from dj2mgm.juicer.engine import build_operators
    from dj2mgm.juicer.patched_data_juicer import prepare_process
    from dj2mgm.juicer.recipe_settings import read_filter_settings
    from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
    from dj2mgm.recipes.recipe_parsing import parse_steps

    logger.remove()
    prepare_process()
    give_up_rights(work, decoys)
    assert build_operators(parse_steps("recipe", [{"text_length_filter": {}}]), work)
    render_chat("", [])  # starts the workflow's process for chat templates, which is not a finding
    recorder = Recorder(work, decoys)
    earlier_state = read_state(decoys)
    settings = {"image_root": str(work / "data"), "processes": 1}
    for number, (process, trusted) in enumerate(cases):
        start, outcome = time.monotonic(), "ran"
        recorder.events = []
        recorder.is_on = True
        try:
            changes = {"recipe": {"process": process}, "trusted_recipes": trusted}
            (work / "config.yaml").write_text(json.dumps(settings | changes))
            run_recipe(read_filter_settings(work / "config.yaml"), work / "data/pairs.jsonl", work / "out", FILTERED)
        except InputError as error:
            outcome = f"refused: {error}"
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}: {error}"
        recorder.is_on = False
        state = read_state(decoys)
        changed = [path for path in state | earlier_state if state.get(path) != earlier_state.get(path)]
        earlier_state = state
        seconds = round(time.monotonic() - start, 2)
        finding = {"case": number, "outcome": outcome[:600], "seconds": seconds}
        finding |= {"events": recorder.events, "changed": changed}
        print(json.dumps(finding), file=findings, flush=True)


if __name__ == "__main__":
    main()
