"""Deadlines of HTTP requests.

httpx's own time limits count silence, so a server that drips bytes never exceeds them. A deadline belongs to one
thread, since each thread sends one request at a time.
"""

import threading
import time

import httpcore
import httpx


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

    def sent(self) -> None:
        """Begin the wait for the answer's head."""
        if self.head_s is not None:
            self.head = time.monotonic() + self.head_s

    def head_has_come(self) -> None:
        self.head, self.head_s = float("inf"), None

    def left(self, timeout: float | None, error: type[Exception]) -> float:
        """Return the seconds that the next operation may take.

        Raises:
            Exception: `error`, if there are none left.
        """
        left = min(self.whole, self.head) - time.monotonic()
        if left <= 0:
            raise error("the deadline of the request has passed")
        return left if timeout is None else min(left, timeout)


def keep_deadlines(client: httpx.Client) -> Deadlines:
    """Make all connections of a client keep the returned deadlines.

    It uses private attributes, since httpx has no public access to the connections of clients that use the
    environment's proxies.
    """
    deadlines = Deadlines()
    for transport in (client._transport, *filter(None, client._mounts.values())):
        pool = transport._pool
        pool._network_backend = _Backend(pool._network_backend, deadlines)
    return deadlines


class _Backend(httpcore.NetworkBackend):
    def __init__(self, backend: httpcore.NetworkBackend, deadlines: Deadlines):
        self._backend, self._deadlines = backend, deadlines

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        timeout = self._deadlines.left(timeout, httpcore.ConnectTimeout)
        stream = self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._deadlines)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, deadlines: Deadlines):
        self._stream, self._deadlines = stream, deadlines

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadlines.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadlines.left(timeout, httpcore.WriteTimeout))
        self._deadlines.sent()

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, ssl_context, server_hostname=None, timeout=None) -> httpcore.NetworkStream:
        timeout = self._deadlines.left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, timeout), self._deadlines)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
