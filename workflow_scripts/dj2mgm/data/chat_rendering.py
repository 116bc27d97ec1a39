"""Renderer of model folders' chat templates: transformers' sandbox, in a process with limits of time and memory.

The sandbox blocks code, but a template can still loop forever or fill the memory, also for a single row. So each
process forks a renderer process, which ends when its parent ends. A template is compiled there too: Jinja computes
constant expressions, such as `'a' * 10**10`, when it compiles.
"""

import json
import os
import re
import resource
import signal
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from transformers.utils.chat_template_utils import render_jinja_template

from dj2mgm.errors import InputError

CPU_S = 5.0  # limit of one rendering, which normally takes less than a millisecond
MEMORY_LIMIT = 1 << 30  # bytes of address space, in addition to those of the process that it is forked from
MAX_OUTPUT_LENGTH = 1 << 26  # characters of a rendered conversation
SHOWN_CHARACTERS = 200  # characters of a template's error
GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
Spans = list[tuple[int, int]]


class _Renderer:
    """Process that renders, and the template that it received last."""

    def __init__(self):
        self.source = ""
        self.connection, renderers_end = Pipe()
        self.pid = os.fork()  # multiprocessing allows no children of a data loader's process
        if self.pid == 0:
            _render_requests(renderers_end)
        renderers_end.close()

    def ask(self, source: str, variables: dict) -> dict:
        """Send a request and return the answer; after an InputError, the next request needs a new process."""
        request = variables if source == self.source else variables | {"chat_template": source}
        self.source = source
        try:
            self.connection.send_bytes(json.dumps(request).encode())
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            reason = f"{MEMORY_LIMIT >> 20} MiB of memory"
            if os.WTERMSIG(self._wait()) == signal.SIGPROF:
                reason = f"{CPU_S:g} s"
            raise InputError(f"it takes more than {reason} for one conversation") from None

    def end(self) -> None:
        self.connection.close()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int:
        """Wait for the end of the process, whose id another process may get afterwards; return its status."""
        pid, self.pid = self.pid, 0
        return os.waitpid(pid, 0)[1]


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
        source: the template.
        messages: messages in transformers' format, of plain values.
        variables: variables of the template, such as `add_generation_prompt` and special tokens.

    Returns:
        The text, and the spans of answers that `{% generation %}` marks in it.

    Raises:
        InputError: the template raises an error, or exceeds a limit.
    """
    global _renderer
    with _lock:
        if _renderer is None:
            _renderer = _Renderer()
        try:
            answer = _renderer.ask(source, variables | {"conversations": [messages]})
        except BaseException:  # also an interrupt: the next answer would belong to this request
            _renderer.end()
            _renderer = None
            raise
    if problem := answer.get("problem"):
        raise InputError(" ".join(problem.split())[:SHOWN_CHARACTERS])
    return answer["text"], [(begin, end) for begin, end in answer["spans"]]


def _render_requests(connection: Connection) -> NoReturn:
    """Answer requests in a forked process until its parent ends."""
    try:
        _detach(connection)
        request: dict = {}
        while True:
            source = request.get("chat_template", "")
            request = {"chat_template": source} | json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # the timer's signal ends the process
            answer = json.dumps(_answer(request))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer.encode())
    finally:
        os._exit(1)


def _detach(connection: Connection) -> None:
    """Give up the parent's signal handlers and open files, except for the connection; set the limits."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    for begin, end in ((0, connection.fileno()), (connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(begin, end)
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))


def _answer(request: dict) -> dict:
    """Return the rendered conversation and the spans of the answers in it, or the template's problem."""
    marks = GENERATION_TAG.search(request["chat_template"]) is not None
    try:
        [text], spans = render_jinja_template(**request, return_assistant_tokens_mask=marks)
    except MemoryError:
        os._exit(1)
    except Exception as error:  # templates can cause errors of any type
        return {"problem": f"{error}"[:1000] or type(error).__name__}
    if len(text) > MAX_OUTPUT_LENGTH:
        return {"problem": f"it writes more than {MAX_OUTPUT_LENGTH} characters"}
    return {"text": text, "spans": spans[0] if marks else []}
