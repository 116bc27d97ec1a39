"""Server of chat completions in this process that answers requests by a test's function and records them.

with ScriptedServer(lambda request: caption("a red boat")) as server: ...
"""

import base64
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

from PIL import Image

from dj2mgm.storage.files import read_yaml
from paths import PROJECT

MODEL = "tiny"


@dataclass
class Reply:
    """An answer of the server.

    `action` changes the answer: `reset` closes the connection instead, `truncate` closes it after half of the body,
    `hang` sends nothing, `flood` repeats the body, `drip` does so slowly, and `drip head` sends headers without end.
    """

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    action: str = ""


@dataclass
class CaptionRequest:
    """Request for a caption: its number from 1, its number for the same image, the image, body and headers."""

    number: int
    time_of_image: int
    image: Image.Image
    body: dict
    headers: dict[str, str]


def caption(text: str | None, finish: str = "stop", tokens: int | None = 10, **message) -> Reply:
    values = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text} | message}]}
    values["choices"][0]["finish_reason"] = finish
    if tokens is not None:
        values["usage"] = {"prompt_tokens": 1, "completion_tokens": tokens - 1, "total_tokens": tokens}
    return Reply(body=json.dumps(values), headers={"Content-Type": "application/json"})


class ScriptedServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        caption_counts: number of captions for each image, by its data URL.
        request_counts: number of requests for each image.
        most_in_flight: requests at the same time.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, reply: Callable[[CaptionRequest], Reply], models: Reply | list[str] = (MODEL,), key: str | None = None
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.models = models
        self.key = key
        self.request_counts: Counter[str] = Counter()
        self.caption_counts: Counter[str] = Counter()
        self.lists = self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def requests(self) -> int:
        return self.request_counts.total()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Ignore the error of a client that has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedServer

    def do_GET(self):
        self.server.lists += 1
        models = self.server.models
        if not isinstance(models, Reply):
            models = Reply(body=json.dumps({"object": "list", "data": [{"id": name} for name in models]}))
        self._send(self._refusal() or models)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        [image_part, _] = body["messages"][0]["content"]
        url = image_part["image_url"]["url"]
        with server.lock:
            server.request_counts[url] += 1
            request_number, image_request_number = server.request_counts.total(), server.request_counts[url]
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        image = Image.open(BytesIO(base64.b64decode(url.partition("base64,")[2])))
        reply = self._refusal() or server.reply(
            CaptionRequest(request_number, image_request_number, image, body, dict(self.headers))
        )
        with server.lock:
            server.in_flight -= 1
            server.caption_counts[url] += reply.status == 200 and '"content": "' in reply.body and not reply.action
        self._send(reply)

    def _refusal(self) -> Reply | None:
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return None
        return Reply(401, f"bad key: {self.headers.get('Authorization')}")

    def _send(self, reply: Reply) -> None:
        if reply.action == "hang":
            self.server.released.wait()
        if reply.action in ("hang", "reset"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        content = reply.body.encode()
        if reply.action == "drip head":
            return self._drip_head()
        if reply.action in ("flood", "drip"):
            return self._send_without_end(content, 0.02 if reply.action == "drip" else 0.0)
        self.send_response(reply.status)
        for name, value in ({"Content-Length": str(len(content))} | reply.headers).items():
            self.send_header(name, value)
        self.end_headers()
        half = len(content) // 2 if reply.action == "truncate" else None
        self.wfile.write(content[:half])
        self.close_connection = half is not None

    def _send_without_end(self, content: bytes, pause: float) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while not self.server.released.wait(pause):
                self.wfile.write(content)

    def _drip_head(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self.server.released.wait(0.02):
                self.wfile.write(b"a")

    def log_message(self, *_):
        """Log nothing."""


def make_server_captioner(url: str, **changes) -> dict:
    defaults = read_yaml(PROJECT / "config/config.yaml")["synthesize"]["openai"]
    return {"name": "openai"} | defaults | {"base_url": url, "model": MODEL, "concurrency": 4, "retries": 1} | changes


def read_text(request: CaptionRequest) -> str:
    return request.body["messages"][0]["content"][1]["text"]
