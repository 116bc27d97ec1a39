"""Servers behind a proxy of the environment, with a proxy in this process that refuses every request."""

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from dj2mgm.errors import InputError
from dj2mgm.features.fetch.repositories import HubSource
from dj2mgm.features.servers.chat_server import ChatServer, RequestError
from dj2mgm.servers import connections
from dj2mgm.servers.connections import find_proxy, make_client
from dj2mgm.servers.hub import hub_errors, make_quiet_api
from scripted_server import ScriptedServer, caption

KEY = "sk-toy-0123456789abcdef"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:  # it sends nothing
    try:
        udp.connect(("198.51.100.1", 9))
        OWN_ADDRESS = udp.getsockname()[0]  # of the network, if there is one
    except OSError:
        OWN_ADDRESS = "127.0.0.1"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Proxy(ThreadingHTTPServer):
    """Proxy that answers every request with `status`, and records lines and headers of the requests."""

    daemon_threads = True

    def __init__(self, status: int):
        super().__init__(("127.0.0.1", 0), _Refuser)
        self.status, self.requests = status, []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Refuser(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(f"{self.requestline} {self.headers}")
        self.send_error(self.server.status)

    do_CONNECT = do_POST = do_GET  # noqa: N815 (names of BaseHTTPRequestHandler)

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def refuse(monkeypatch):
    """Start a proxy, and name it in the environment as the proxy of all schemes."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("TOY_KEY", KEY)
    started = []

    def start(status: int, variable: str = "all_proxy", scheme: str = "http") -> Proxy:
        started.append(Proxy(status))
        monkeypatch.setenv(variable, f"{scheme}://me:secret@{started[-1].address}")
        return started[-1]

    yield start
    for proxy in started:
        proxy.shutdown()
        proxy.server_close()


@pytest.mark.parametrize(
    ("host", "scheme", "variable"),
    [
        ("127.0.0.1", "http", "all_proxy"),
        ("localhost", "https", "http_proxy"),
        ("localhost", "socks5", "all_proxy"),
        ("127.0.0.1", "gopher", "HTTPS_PROXY"),
    ],
)
def test_a_server_on_this_machine_is_asked_directly(refuse, host, scheme, variable):
    proxy = refuse(403, variable, scheme)
    with ScriptedServer(lambda request: caption("a boat"), key=KEY) as server:
        ChatServer(server.url.replace("127.0.0.1", host), "tiny", "TOY_KEY", 1, 5).check_model()
        assert server.lists == 1 and proxy.requests == []


@pytest.mark.parametrize(
    "host",
    ["127.9.8.7", "[::1]", "0.0.0.0", "LOCALHOST", "a.localhost", "[::ffff:127.0.0.1]", "127.1", "ip6-localhost"],
)
def test_names_of_this_machine(refuse, host):
    refuse(403)
    url = f"http://{host}:1/v1"
    assert find_proxy(make_client(url), url) is None


def test_no_proxy_and_a_proxy_without_a_port(refuse, monkeypatch):
    monkeypatch.setenv("all_proxy", "http://proxy.example")
    url = "http://models.example/v1"
    assert find_proxy(make_client(url), url) == "http://proxy.example"
    monkeypatch.setenv("no_proxy", "models.example")
    assert find_proxy(make_client(url), url) is None


@pytest.mark.parametrize(("address", "is_own"), [("127.0.1.1", True), (OWN_ADDRESS, True), ("198.51.100.1", False)])
def test_names_with_an_address_of_this_machine(refuse, monkeypatch, address, is_own):
    refuse(403)
    resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: resolved if host == "worker-7" else [])
    url = "http://worker-7:1/v1"
    assert (find_proxy(make_client(url), url) is None) == is_own


def test_a_slow_name_server_is_not_waited_for(refuse, monkeypatch):
    refuse(403)
    monkeypatch.setattr(connections, "RESOLVE_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(15) or [])
    url, started = "http://worker-7:1/v1", time.monotonic()
    assert find_proxy(make_client(url), url) and time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("url", "status", "error", "message"),
    [
        ("http://models.example/v1", 403, InputError, "the server or the proxy refuses the request (403)"),
        ("http://models.example/v1", 407, InputError, "the proxy needs a name and a password (407)"),
        ("http://models.example/v1", 503, RequestError, "503"),
        ("https://models.example/v1", 403, RequestError, "no way through the proxy ('403 Forbidden')"),
    ],
)
def test_a_message_names_the_proxy(refuse, url, status, error, message):
    proxy = refuse(status)
    server = ChatServer(url, "tiny", "TOY_KEY", 1, 5)
    assert server.name == f"{url} (model tiny, through the proxy http://{proxy.address})"
    with pytest.raises(error) as raised:
        server.check_model()
    assert message in str(raised.value) and KEY not in str(raised.value) and "secret" not in str(raised.value)
    if url.startswith("https"):
        assert KEY not in "".join(proxy.requests)


@pytest.mark.parametrize("scheme", ["socks5", "gopher"])
def test_a_proxy_that_cannot_be_used_gets_a_sentence(refuse, monkeypatch, scheme):
    refuse(403, scheme=scheme)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(InputError, match=r"a proxy in the environment cannot be used .*NO_PROXY") as raised:
        ChatServer("http://models.example/v1", "tiny", None, 1, 5)
    assert "secret" not in str(raised.value)
    with pytest.raises(InputError, match="a proxy in the environment cannot be used"):
        make_quiet_api().model_info("somebody/model")


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("http://hub.example", 403, r"the hub or the proxy {} refuses the request \(403\).*NO_PROXY.*HF_TOKEN"),
        ("http://hub.example", 407, r"the proxy {} needs a name and a password \(407\)"),
        ("https://hub.example", 403, r"the proxy {} gives no way to the hub \(403 Forbidden\).*NO_PROXY"),
        ("https://hub.example", 407, r"the proxy {} needs a name and a password \(407\)"),
        ("https://hub.example", 502, r"the proxy {} gives no way to the hub \(502 Bad Gateway\).*NO_PROXY"),
    ],
)
def test_failures_of_the_proxy_are_not_the_hubs(refuse, monkeypatch, url, status, message):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    proxy = refuse(status)
    source = HubSource("a/b", "model", ("*.json",))
    with (
        pytest.raises(InputError, match=message.format(f"http://{proxy.address}")) as raised,
        hub_errors(source.request),
    ):
        make_quiet_api().repo_info("a/b")
    assert "gated" not in str(raised.value) and "secret" not in str(raised.value)
