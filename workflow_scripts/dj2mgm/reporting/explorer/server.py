"""Serves pages of the explorer on this machine, to whoever knows the token in their address.

Images are asked for by the number of their row, and no path is ever taken from a request.
"""

import json
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np

from dj2mgm.data.images import BadImage, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.reporting.explorer.page import numbers_of, served_page
from dj2mgm.reporting.explorer.results import Results
from dj2mgm.reporting.explorer.table import Table
from dj2mgm.reporting.links import page_name

HOST = "127.0.0.1"
SIDES = (160, 640)  # px, longest side of an image in the table and in full
THUMBNAILS = 5000  # kept; some 5 KB each
AT_ONCE = 2000  # rows that one request may ask for
MOST_CONNECTIONS = 64  # a browser opens six
REQUEST_S = 30.0  # for a whole request to come, also on a connection that waits for the next one; and of silence
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
Answer = tuple[str, bytes]  # type and content


class NotThere(Exception):
    """What is asked for does not exist."""


class Explorer:
    """What is served: a page for each of the results, its rows and images, and reports that link to the pages."""

    def __init__(self, results: list[Results], reports: dict[str, bytes]):
        """
        Raises:
            InputError: two results have the same name, which their pages are found by.
        """
        [(name, count)] = Counter(one.name for one in results).most_common(1)
        if count > 1:
            raise InputError(f"{count} of the folders are named {name}, and pages go by names; explore one at a time")
        self.pages = {page_name(one.name): served_page(one).encode() for one in results}
        self.reports = reports
        self.tables = {one.name: {table.name: table for table in one.tables} for one in results}
        self.picture = lru_cache(THUMBNAILS)(self._picture)

    def answer(self, path: str, query: dict[str, list[str]]) -> Answer:
        """
        Raises:
            NotThere: for all that is no page, and no row of a table.
        """
        if path in self.pages:
            return "text/html; charset=utf-8", self.pages[path]
        if path in self.reports:
            return "text/html; charset=utf-8", self.reports[path]
        parts = path.split("/")
        answers: dict[str, tuple[Callable[..., Answer], set[str]]] = {
            "numbers": (self._numbers, set()),
            "rows": (self._rows, {"at"}),
            "find": (self._find, {"words"}),
            "image": (self._image, {"at", "side"}),
        }
        table = self.tables.get(parts[0], {}).get(parts[1]) if len(parts) == 3 else None
        answer, keys = answers.get(parts[-1], (None, set()))
        if table is None or answer is None or set(query) != keys:
            raise NotThere
        return answer(table, **{key: values[-1] for key, values in query.items()})

    def _numbers(self, table: Table) -> Answer:
        return "application/octet-stream", numbers_of(table)

    def _rows(self, table: Table, at: str) -> Answer:
        rows = [_row(table, number) for number in at.split(",")[:AT_ONCE]]
        return "application/json", json.dumps([table.texts[row] for row in rows], ensure_ascii=False).encode()

    def _find(self, table: Table, words: str) -> Answer:
        wanted = words.lower()
        texts = ([row["id"], *(text for _, text in row["lines"])] for row in table.texts)
        found = (any(wanted in text.lower() for text in row) for row in texts)
        return "application/octet-stream", np.fromiter(found, dtype=np.uint8, count=len(table)).tobytes()

    def _image(self, table: Table, at: str, side: str) -> Answer:
        if side not in map(str, SIDES):
            raise NotThere
        return self.picture(table.image_root, table.texts[_row(table, at)]["image"], int(side))

    @staticmethod
    def _picture(root, relative: str, side: int) -> Answer:
        """The image, scaled down; in place of one that cannot be read, the reason."""
        try:
            image = load_image(locate_image(root, relative))
        except BadImage as error:
            text = f'<text x="4" y="40" font-size="13" fill="#b23a24">{escape(error.reason)}</text>'
            drawn = f'<svg xmlns="http://www.w3.org/2000/svg" width="84" height="68">{text}</svg>'
            return "image/svg+xml", drawn.encode()
        image.thumbnail((side, side))
        buffer = BytesIO()
        image.save(buffer, "WEBP", quality=80, method=0)
        return "image/webp", buffer.getvalue()


def _row(table: Table, number: str) -> int:
    if not number.isascii() or not number.isdigit() or len(number) > 12 or int(number) >= len(table):
        raise NotThere
    return int(number)


class Server(ThreadingHTTPServer):
    """Answers on this machine only, below /<token>/."""

    daemon_threads = True

    def __init__(self, explorer: Explorer, port: int = 0):
        """
        Args:
            port: 0 for any that is free.

        Raises:
            InputError: the port is taken.
        """
        self.explorer = explorer
        self.open: dict[socket.socket, float] = {}  # connections, and when the request that they wait for must be there
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:  # OverflowError: no port has such a number
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"port {port} cannot be opened ({reason}); name another one with --port") from None

    def process_request(self, request: socket.socket, client_address: object) -> None:
        if len(self.open) >= MOST_CONNECTIONS:
            return self.shutdown_request(request)
        self.await_request(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.open.pop(request, None)
        super().shutdown_request(request)

    def await_request(self, connection: socket.socket) -> None:
        self.open[connection] = time.monotonic() + REQUEST_S

    def request_has_come(self, connection: socket.socket) -> None:
        self.open[connection] = float("inf")

    def service_actions(self) -> None:
        """End connections whose request is not there in time; `serve_forever` calls this twice a second."""
        now = time.monotonic()
        for connection in [connection for connection, until in list(self.open.items()) if until < now]:
            with suppress(OSError):  # it has just been closed
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that no longer waits for an image is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def address(self, page: str) -> str:
        """Of a page, as a browser wants it: quoted."""
        return f"http://{HOST}:{self.server_port}/{self.token}/{quote(page, safe='')}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S
    server: Server

    def handle_one_request(self) -> None:
        self.server.await_request(self.connection)
        super().handle_one_request()

    def do_GET(self) -> None:
        self.server.request_has_come(self.connection)
        if self.headers.get("Host") != f"{HOST}:{self.server.server_port}":
            return self._refuse(HTTPStatus.FORBIDDEN)
        try:
            parts = urlsplit(self.path)
        except ValueError:  # as of http://[/
            return self._refuse(HTTPStatus.BAD_REQUEST)
        _, token, path = (parts.path + "//").split("/", 2)
        path = unquote(path).rstrip("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._refuse(HTTPStatus.FORBIDDEN)
        try:
            kind, content = self.server.explorer.answer(path, parse_qs(parts.query))
        except NotThere:
            return self._refuse(HTTPStatus.NOT_FOUND)
        self._send(HTTPStatus.OK, kind, content, path)

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", status.phrase.encode(), "")

    def _send(self, status: HTTPStatus, kind: str, content: bytes, path: str) -> None:
        headers = HEADERS | {"Content-Type": kind, "Content-Length": str(len(content))}
        if path in self.server.explorer.reports:
            headers["Content-Security-Policy"] = REPORT_POLICY
        if kind.startswith("image/"):
            headers["Cache-Control"] = "private, max-age=3600"
            headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: addresses hold the token."""
