"""Clients that ask a server on this machine directly, and proxies of the environment for all other servers."""

import ipaddress
import socket
import threading
from contextlib import suppress
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import getproxies

from dj2mgm.errors import InputError

PROXY_NEEDS_PASSWORD = 407
LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
RESOLVE_S = 2.0  # longest time for the addresses of a name; behind a proxy there may be no name server


def make_client(library: ModuleType, url: str, **options):
    """Return a client of httpx or httpx2 for the server at `url`.

    A proxy cannot reach this machine's own servers, and would receive their key.

    Raises:
        InputError: the environment names a proxy that the library cannot use.
    """
    if _is_this_machine(urlsplit(url).hostname or ""):
        return library.Client(trust_env=False, verify=library.create_ssl_context(), **options)
    try:
        return library.Client(**options)
    except (ImportError, ValueError, library.InvalidURL) as error:
        reason = "SOCKS needs the package socksio" if isinstance(error, ImportError) else "its address is not valid"
        raise InputError(
            f"{url}: a proxy in the environment cannot be used ({reason}). Correct HTTP_PROXY, HTTPS_PROXY or "
            "ALL_PROXY, or name the server in NO_PROXY"
        ) from None


def find_proxy(client, url: str) -> str | None:
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
