"""Connections to chat servers and the hub: proxies of the environment, and limits of a server's answers.

The time limits of httpx2 count silence, so a server that drips bytes never exceeds them. Requests have deadlines too.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpcore2
import httpx2

from dj2mgm.errors import InputError

PROXY_NEEDS_PASSWORD = 407
LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
RESOLVE_S = 2.0  # longest time for the addresses of a name; behind a proxy there may be no name server


def make_client(url: str, **options) -> httpx2.Client:
    """Return a client for the server at `url`.

    A proxy cannot reach this machine's own servers, and would receive their key.

    Raises:
        InputError: the environment names a proxy that the library cannot use.
    """
    if _is_this_machine(urlsplit(url).hostname or ""):
        return httpx2.Client(trust_env=False, verify=httpx2.create_ssl_context(), **options)
    try:
        return httpx2.Client(**options)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        reason = "SOCKS needs the package socksio" if isinstance(error, ImportError) else "its address is not valid"
        raise InputError(
            f"{url}: a proxy in the environment cannot be used ({reason}). Correct HTTP_PROXY, HTTPS_PROXY or "
            "ALL_PROXY, or name the server in NO_PROXY"
        ) from None


def find_proxy(client: httpx2.Client, url: str) -> str | None:
    """Return the address of the proxy through which a client asks a server, without name and password."""
    proxy = getattr(client._transport_for_url(client.build_request("GET", url).url)._pool, "_proxy_url", None)
    if proxy is None:
        return None
    port = f":{proxy.port}" if proxy.port else ""
    return f"{proxy.scheme.decode()}://{proxy.host.decode()}{port}"


def _is_this_machine(host: str) -> bool:
    """Return whether a host is this machine: by its name, or by an address that the name has here."""
    name = host.lower().rstrip(".")
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    return bool(host and getproxies()) and any(map(_is_own_address, _resolve(host)))


def _resolve(host: str) -> list[tuple]:
    """Return the addresses of a host; none if they are not known within RESOLVE_S seconds."""
    addresses: list[tuple] = []

    def look_up() -> None:
        with suppress(OSError, ValueError):  # unknown name, or not a name
            addresses.extend(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    return list(addresses)


def _is_own_address(address: tuple) -> bool:
    """Return whether an entry of `socket.getaddrinfo` has an address of this machine, which a socket can have."""
    family, *_, socket_address = address
    ip = ipaddress.ip_address(socket_address[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback or ip.is_unspecified:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as own:
            own.bind(socket_address)
    except OSError:
        return False
    return not ip.is_multicast


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


def keep_deadlines(client: httpx2.Client) -> Deadlines:
    """Make all connections of a client keep the returned deadlines.

    It uses private attributes, since httpx2 has no public access to the connections of clients that use the
    environment's proxies.
    """
    deadlines = Deadlines()
    for transport in (client._transport, *filter(None, client._mounts.values())):
        transport._pool._network_backend = _Backend(transport._pool._network_backend, deadlines)
    return deadlines


class _Backend:
    def __init__(self, backend, deadlines: Deadlines):
        self._backend, self._deadlines = backend, deadlines

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        timeout = self._deadlines.compute_remaining(timeout, httpcore2.ConnectTimeout)
        stream = self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._deadlines)


class _Stream:
    def __init__(self, stream, deadlines: Deadlines):
        self._stream, self._deadlines = stream, deadlines

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadlines.compute_remaining(timeout, httpcore2.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadlines.compute_remaining(timeout, httpcore2.WriteTimeout))
        self._deadlines.mark_sent()

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, ssl_context, server_hostname=None, timeout=None) -> "_Stream":
        timeout = self._deadlines.compute_remaining(timeout, httpcore2.ConnectTimeout)
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Stream(stream, self._deadlines)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
