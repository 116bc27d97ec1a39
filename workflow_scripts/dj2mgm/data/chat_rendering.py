"""Chat templates of model folders, rendered in a process with limits of time and memory.

Each process that renders has one of its own, which ends with it. A template is compiled there, too: Jinja computes
constant expressions, such as `'a' * 10**10`, when it compiles.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading

from dj2mgm.data import chat_template_process
from dj2mgm.data.chat_template_process import CPU_S, MEMORY, TOO_LARGE
from dj2mgm.errors import InputError

Spans = list[tuple[int, int]]
SHOWN = 200  # characters of what a template says


class _Renderer:
    """The process, and the templates that it knows."""

    def __init__(self):
        command = [sys.executable, "-I", chat_template_process.__file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.known: set[str] = set()

    def ask(self, source: str, variables: dict) -> dict:
        """
        Raises:
            InputError: the process has ended, or has no memory left; ask another one next time.
        """
        name = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        request = {"name": name, "variables": variables} | ({} if name in self.known else {"source": source})
        line = b""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        answer = json.loads(line) if line.endswith(b"\n") else None
        if answer is None or answer.get("problem") == TOO_LARGE:
            raise InputError(self._end())
        self.known.add(name)
        return answer

    def _end(self) -> str:
        """End the process; return the limit that it has reached."""
        with contextlib.suppress(BrokenPipeError):  # of a request that it has not read
            self.process.stdin.close()
        self.process.stdout.close()
        if self.process.wait() == -signal.SIGPROF:
            return f"it takes more than {CPU_S:g} s for one conversation"
        return f"it takes more than {MEMORY >> 20} MiB of memory for one conversation"


_lock = threading.Lock()
_renderer: _Renderer | None = None


def _forget() -> None:
    """Leave the renderer to the process that started it, in a forked process."""
    global _lock, _renderer
    _lock, _renderer = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def render(source: str, messages: list[dict], **variables: object) -> tuple[str, Spans]:
    """Render a conversation as transformers' `apply_chat_template` does.

    Args:
        source: Jinja.
        messages: as transformers takes them; plain values only.
        variables: of the template, such as `add_generation_prompt` and special tokens.

    Returns:
        The text, and where `{% generation %}` marks answers in it.

    Raises:
        InputError: the template cannot be rendered, or not within the limits.
    """
    global _renderer
    variables = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
    with _lock:
        if _renderer is None:
            _renderer = _Renderer()
        try:
            answer = _renderer.ask(source, variables | {"messages": messages})
        except BaseException:  # also an interrupt, after which the answers would be those of earlier requests
            _renderer.process.kill()
            _renderer = None
            raise
    if problem := answer.get("problem"):
        raise InputError(" ".join(problem.split())[:SHOWN])
    return answer["text"], [(begin, end) for begin, end in answer["spans"]]
