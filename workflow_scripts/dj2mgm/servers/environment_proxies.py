"""Clients that ask a server on this machine directly, and proxies of the environment for all other servers."""

import ipaddress
from types import ModuleType
from urllib.parse import urlsplit

from dj2mgm.errors import InputError

PROXY_NEEDS_PASSWORD = 407


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
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified
