"""Limits of a server's answers, for chat servers and the hub: time, bytes, compression, and requested pauses.

The time limits of httpx count silence, so a server that drips bytes never exceeds them. Requests have deadlines too.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from types import ModuleType

MAX_PAUSE_S = 600.0  # longest pause that a server may request; during a longer one a stage would hold its GPUs
LONGEST_PAUSE_S = 1e9  # a longer requested pause counts as this one
MIN_SHOWN_PAUSE_S = 10.0  # pauses that the server requests are shown from this length on


class TooLongAnswerError(ValueError):
    """An answer with more bytes than allowed."""


def limit_bytes(parts: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the parts of an answer.

    Raises:
        TooLongAnswerError: they have more than `max_bytes` bytes.
    """
    for part in parts:
        max_bytes -= len(part)
        if max_bytes < 0:
            raise TooLongAnswerError
        yield part


def is_compressed(headers: Mapping[str, str]) -> bool:
    """Return whether an answer must be decompressed to know its size, although every request excludes this."""
    return headers.get("Content-Encoding", "identity") != "identity"


def read_retry_after(headers: Mapping[str, str]) -> float:
    """Return the pause in seconds from the header Retry-After (seconds or a date); 0 without one."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(seconds, LONGEST_PAUSE_S) if seconds > 0 else 0.0  # 0 for "nan"


class Deadlines(threading.local):
    """Deadlines of this thread's current request.

    Attributes:
        whole: deadline of the whole request, in seconds of `time.monotonic`.
        head: deadline of the answer's head, likewise.
        head_s: seconds between the end of the request and the answer's head; None once the head has come.
    """

    whole = float("inf")
    head = float("inf")
    head_s: float | None = None

    def start(self, whole_s: float, head_s: float) -> None:
        """Begin a request."""
        now = time.monotonic()
        self.whole, self.head, self.head_s = now + whole_s, now + whole_s, head_s

    def mark_sent(self) -> None:
        """Begin the wait for the answer's head."""
        if self.head_s is not None:
            self.head = time.monotonic() + self.head_s

    def mark_head_received(self, body_s: float = float("inf")) -> None:
        """Begin the wait for the answer's body, which may take `body_s` seconds."""
        self.head, self.head_s = float("inf"), None
        self.whole = min(self.whole, time.monotonic() + body_s)

    def extend(self, seconds: float) -> None:
        """Allow the request more time."""
        self.whole += seconds

    def compute_remaining(self, timeout: float | None, error: type[Exception]) -> float | None:
        """Return the seconds that the next operation may take; raise `error` if no seconds remain."""
        seconds = min(self.whole, self.head) - time.monotonic()
        if seconds <= 0:
            raise error("the deadline of the request has passed")
        return min((limit for limit in (seconds, timeout) if limit not in (None, float("inf"))), default=None)


def keep_deadlines(client) -> Deadlines:
    """Make all connections of a client of httpx or httpx2 keep the returned deadlines.

    It uses private attributes, since neither library has public access to the connections of clients that use the
    environment's proxies.
    """
    deadlines = Deadlines()
    for transport in (client._transport, *filter(None, client._mounts.values())):
        pool = transport._pool
        core = sys.modules[type(pool).__module__.partition(".")[0]]  # httpcore or httpcore2
        pool._network_backend = _Backend(pool._network_backend, deadlines, core)
    return deadlines


class _Backend:
    def __init__(self, backend, deadlines: Deadlines, core: ModuleType):
        self._backend, self._deadlines, self._core = backend, deadlines, core

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        timeout = self._deadlines.compute_remaining(timeout, self._core.ConnectTimeout)
        stream = self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._deadlines, self._core)


class _Stream:
    def __init__(self, stream, deadlines: Deadlines, core: ModuleType):
        self._stream, self._deadlines, self._core = stream, deadlines, core

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadlines.compute_remaining(timeout, self._core.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadlines.compute_remaining(timeout, self._core.WriteTimeout))
        self._deadlines.mark_sent()

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, ssl_context, server_hostname=None, timeout=None) -> "_Stream":
        timeout = self._deadlines.compute_remaining(timeout, self._core.ConnectTimeout)
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Stream(stream, self._deadlines, self._core)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
