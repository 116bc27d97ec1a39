"""Renderer of model folders' chat templates, in a process with limits of time and memory.

Each process starts one renderer process, which ends when its parent ends. A template is compiled there too: Jinja
computes constant expressions, such as `'a' * 10**10`, when it compiles.
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
from dj2mgm.data.chat_template_process import CPU_S, MEMORY_LIMIT, OUT_OF_MEMORY
from dj2mgm.errors import InputError

Spans = list[tuple[int, int]]
SHOWN_CHARACTERS = 200  # characters of a template's error


class _Renderer:
    """Process that renders, and the names of the templates that it has compiled."""

    def __init__(self):
        command = [sys.executable, "-I", chat_template_process.__file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.compiled: set[str] = set()

    def ask(self, source: str, variables: dict) -> dict:
        """Send a request and return the answer; after an InputError, the next request needs a new process."""
        name = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        request = {"name": name, "variables": variables} | ({} if name in self.compiled else {"source": source})
        line = b""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        answer = json.loads(line) if line.endswith(b"\n") else None
        if answer is None or answer.get("problem") == OUT_OF_MEMORY:
            raise InputError(self._end())
        self.compiled.add(name)
        return answer

    def _end(self) -> str:
        """End the process; return a message about the limit that it reached."""
        with contextlib.suppress(BrokenPipeError):  # closing sends what the renderer never read
            self.process.stdin.close()
        self.process.stdout.close()
        if self.process.wait() == -signal.SIGPROF:
            return f"it takes more than {CPU_S:g} s for one conversation"
        return f"it takes more than {MEMORY_LIMIT >> 20} MiB of memory for one conversation"


_lock = threading.Lock()
_renderer: _Renderer | None = None


def _forget() -> None:
    """Leave the renderer to the parent process after a fork."""
    global _lock, _renderer
    _lock, _renderer = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def render_chat(source: str, messages: list[dict], **variables: object) -> tuple[str, Spans]:
    """Render a conversation as transformers' `apply_chat_template` does.

    Args:
        messages: messages in transformers' format, of plain values.
        variables: variables of the template, such as `add_generation_prompt` and special tokens.

    Returns:
        The text, and the spans of answers that `{% generation %}` marks in it.
    """
    global _renderer
    variables = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
    with _lock:
        if _renderer is None:
            _renderer = _Renderer()
        try:
            answer = _renderer.ask(source, variables | {"messages": messages})
        except BaseException:  # also an interrupt: the next answer would belong to this request
            _renderer.process.kill()
            _renderer = None
            raise
    if problem := answer.get("problem"):
        raise InputError(" ".join(problem.split())[:SHOWN_CHARACTERS])
    return answer["text"], [(begin, end) for begin, end in answer["spans"]]
