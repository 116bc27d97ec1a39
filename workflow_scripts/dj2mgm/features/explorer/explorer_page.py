"""The explorer's page (the grid of DataTables, its own scripts, its rows), and the server of such pages.

The server serves this machine only, and clients that know the token in the address. Requests name images by the number
of their row; no path is ever taken from a request.
"""

import base64
import gzip
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import numpy as np
from markupsafe import Markup

from dj2mgm.cli.messages import note
from dj2mgm.data.images import BadImageError, list_image_folders, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.features.explorer.results import Results, read_run
from dj2mgm.features.explorer.row_table import RowTable
from dj2mgm.records import PageSettings
from dj2mgm.reporting.rendering import (
    build_library_script,
    build_page_style,
    build_template_environment,
    encode_shrunk_image,
    format_integer,
    hash_source,
    locate_explorer_page,
)
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, replace_folder, write_text

FOLDER = Path(__file__).parent  # of the page's template, scripts and style
PAGE_SCRIPTS = ("explore_model.js", "explore_source.js", "explore_recipe.js", "explore_limits.js", "explore_rows.js")
MAX_IMAGES, IMAGE_SIDE = 300, 96  # thumbnails per table in an offline page, about 3 KB each; their longest side in px
MAX_ROWS = 100_000  # a larger dataset gets no page with the report
SCREEN_ROWS = 12  # rows on a first screen: of all rows, of kept rows, and of those that a step drops
HOST = "127.0.0.1"
IMAGE_SIDES = (160, 640)  # px, longest side of an image in the table and in the details
MAX_CACHED_THUMBNAILS = 5000  # images in the cache, about 5 KB each
MAX_ROWS_OF_REQUEST = 2000  # rows per request
MAX_CONNECTIONS = 64  # a browser opens six
REQUEST_S = 30.0  # time limit for a request to arrive, and for silence on a connection
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
Response = tuple[str, bytes]  # content type and content


def build_served_page(results: Results) -> str:
    """Return a page that loads its rows from the server, below its own address."""
    return _build_page(results, {"base": results.name}, "connect-src 'self'; img-src 'self' data:", "", {})


def write_offline_page(results: Results, path: Path) -> None:
    """Write one file with all rows and some thumbnails; all images would make it as large as the dataset.

    Images without a thumbnail are read from their files, whose addresses are relative to the page. A page on another
    machine shows their names.
    """
    note = (
        f"This file contains all rows, and up to {format_integer(MAX_IMAGES)} thumbnails per table. Other images are "
        "read from the dataset's folder, or shown by name if it is not on this machine."
    )
    data, page_folder = {}, os.path.realpath(path.parent)
    folders = {
        table.name: {
            source: quote(os.path.relpath(folder, page_folder))
            for source, folder in list_image_folders(table.image_root).items()
        }
        for table in results.tables
    }
    for table in results.tables:
        data[f"{table.name}-numbers"] = _compress([pack_numbers(table)])
        data[f"{table.name}-texts"] = _compress(_encode_texts(table))
    write_text(path, _build_page(results, {"base": ""}, "img-src data: file:", note, data, folders))


def write_explorers(config: Path, folder: Path) -> None:
    """Write the page of the first run of each experiment in a report's configuration into a folder."""
    with replace_folder(folder) as pages:
        for experiment in load_settings(PageSettings, config).experiments:
            name = experiment.name
            rows = read_json(Path(experiment.dataset) / "summary.json")["pretrain"]
            if rows > MAX_ROWS:
                note(
                    f"the report has no explorer's page of {name}, because {format_integer(rows)} pairs are too many "
                    "for a file. python workflow_scripts/explore.py with the folder of its results serves them"
                )
                continue
            try:
                results = read_run(name, {stage: Path(path) for stage, path in experiment.runs[0].stages.items()})
            except InputError as error:
                note(f"the explorer's page of {name} is not written: {error}")
                continue
            write_offline_page(results, pages / f"{name}.html")


def pack_numbers(table: RowTable) -> bytes:
    """Pack all columns, then the step that dropped each row, as float64 in this machine's byte order."""
    columns = [column.values for column in table.columns.values()]
    return b"".join(values.tobytes() for values in [*columns, *([] if table.fate is None else [table.fate])])


def _build_page(
    results: Results,
    base: dict,
    sources: str,
    note: str,
    data: dict[str, str],
    folders: dict[str, dict[str, str]] | None = None,
) -> str:
    """Return the page, whose policy allows only its own scripts and styles, and images from `sources`.

    `folders` has the addresses of each table's image folders, by source.
    """
    style = build_page_style(FOLDER / "explore_style.css")
    library = build_library_script()
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in PAGE_SCRIPTS)
    scripts = " ".join(map(hash_source, (library, script)))
    policy = f"default-src 'none'; script-src {scripts}; style-src {hash_source(style)}; {sources}; base-uri 'none'"
    templates = build_template_environment(FOLDER)
    note = " ".join(dict.fromkeys(filter(None, [note, *(table.note for table in results.tables)])))
    tables = [{"name": table.name, "title": table.title, "rows": len(table)} for table in results.tables]
    described = [_describe(table) | {"folders": (folders or {}).get(table.name, {})} for table in results.tables]
    model = json.dumps(base | {"name": results.name, "tables": described}, ensure_ascii=False)
    return templates.get_template("explore.html.j2").render(
        name=results.name,
        origin=results.origin,
        policy=policy + "; form-action 'none'",
        style=Markup(style),
        tables=tables,
        note=note,
        model=Markup(model.replace("<", "\\u003c")),
        library=Markup(library),
        script=Markup(script),
        data=data,
    )


def _describe(table: RowTable) -> dict:
    return {
        "name": table.name,
        "rows": len(table),
        "shown": table.first_filter,
        "recipes": table.recipes,
        "columns": {key: {"label": column.label, "words": column.words} for key, column in table.columns.items()},
        "steps": [step.as_dict() for step in table.steps],
    }


def _compress(parts: Iterable[bytes]) -> str:
    buffer = BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as file:
        for part in parts:
            file.write(part)
    return base64.b64encode(buffer.getvalue()).decode()


def _encode_texts(table: RowTable) -> Iterator[bytes]:
    """Yield a JSON object with all texts and images, row by row."""
    yield b'{"rows": ['
    for index, row in enumerate(table.texts):
        yield (", " if index else "").encode() + json.dumps(row, ensure_ascii=False).encode()
    yield b'], "images": ' + json.dumps(dict(_encode_images(table))).encode() + b"}"


def describe_problem(error: BadImageError) -> str:
    """Return why an image cannot be shown, in one word."""
    return "damaged" if error.reason == "undecodable" else error.reason


def _encode_images(table: RowTable) -> Iterator[tuple[int, str]]:
    """Return (row, data URI) of the rows on first screens, and of rows evenly spread.

    Instead of the data URI, an image that cannot be read has a word for the reason.
    """
    fate = np.zeros(len(table)) if table.fate is None else table.fate
    groups = [np.arange(len(table)), *(np.flatnonzero(fate == step) for step in range(len(table.steps) + 1))]
    rows = {int(row) for group in groups for row in group[:SCREEN_ROWS]}
    count = min(max(MAX_IMAGES - len(rows), 0), len(table))
    rows |= {index * len(table) // count for index in range(count)}
    for row in sorted(rows):
        try:
            image = load_image(locate_image(table.image_root, table.texts[row]["image"]))
        except BadImageError as error:
            yield row, describe_problem(error)
            continue
        yield row, encode_shrunk_image(image, IMAGE_SIDE)


class NotFoundError(Exception):
    """Error for an address that no page and no row of a table has."""


class Explorer:
    """The served contents: a page for each folder of results, its rows and images, and reports that link to it."""

    def __init__(self, results: list[Results], reports: dict[str, bytes]):
        [(name, count)] = Counter(result.name for result in results).most_common(1)
        if count > 1:
            raise InputError(f"{count} of the folders are named {name}; explore one at a time")
        self.pages = {locate_explorer_page(result.name): build_served_page(result).encode() for result in results}
        self.reports = reports
        self.tables = {result.name: {table.name: table for table in result.tables} for result in results}
        self.read_image = lru_cache(MAX_CACHED_THUMBNAILS)(self._read_image)

    def answer(self, path: str, query: dict[str, list[str]]) -> Response:
        """Answer a request; raise NotFoundError if there is no page and no row of a table at this address."""
        if path in self.pages:
            return "text/html; charset=utf-8", self.pages[path]
        if path in self.reports:
            return "text/html; charset=utf-8", self.reports[path]
        parts = path.split("/")
        answers: dict[str, tuple[Callable[..., Response], set[str]]] = {
            "numbers": (self._answer_numbers, set()),
            "rows": (self._answer_rows, {"at"}),
            "find": (self._answer_find, {"words"}),
            "image": (self._answer_image, {"at", "side"}),
        }
        table = self.tables.get(parts[0], {}).get(parts[1]) if len(parts) == 3 else None
        answer, keys = answers.get(parts[-1], (None, set()))
        if table is None or answer is None or set(query) != keys:
            raise NotFoundError
        return answer(table, **{key: values[-1] for key, values in query.items()})

    def _answer_numbers(self, table: RowTable) -> Response:
        return "application/octet-stream", pack_numbers(table)

    def _answer_rows(self, table: RowTable, at: str) -> Response:
        rows = [_parse_row(table, number) for number in at.split(",")[:MAX_ROWS_OF_REQUEST]]
        return "application/json", json.dumps([table.texts[row] for row in rows], ensure_ascii=False).encode()

    def _answer_find(self, table: RowTable, words: str) -> Response:
        query = words.lower()
        texts = (
            [row["id"], os.path.basename(row["image"]), *(text for _, text in row["lines"])] for row in table.texts
        )
        matches = (any(query in text.lower() for text in row) for row in texts)
        return "application/octet-stream", np.fromiter(matches, dtype=np.uint8, count=len(table)).tobytes()

    def _answer_image(self, table: RowTable, at: str, side: str) -> Response:
        if side not in map(str, IMAGE_SIDES):
            raise NotFoundError
        return self.read_image(table.image_root, table.texts[_parse_row(table, at)]["image"], int(side))

    @staticmethod
    def _read_image(root, relative: str, side: int) -> Response:
        """Return the image, scaled down, or the reason as a drawing if it cannot be read."""
        try:
            image = load_image(locate_image(root, relative))
        except BadImageError as error:
            text = f'<text x="4" y="40" font-size="13" fill="#a93520">{escape(describe_problem(error))}</text>'
            drawing = f'<svg xmlns="http://www.w3.org/2000/svg" width="84" height="68">{text}</svg>'
            return "image/svg+xml", drawing.encode()
        image.thumbnail((side, side))
        buffer = BytesIO()
        image.save(buffer, "WEBP", quality=80, method=0)
        return "image/webp", buffer.getvalue()


def _parse_row(table: RowTable, number: str) -> int:
    if not number.isascii() or not number.isdigit() or len(number) > 12 or int(number) >= len(table):
        raise NotFoundError
    return int(number)


class Server(ThreadingHTTPServer):
    """A server that answers requests of this machine below /<token>/."""

    daemon_threads = True

    def __init__(self, explorer: Explorer, port: int = 0):
        """Open the port; 0 for any free one."""
        self.explorer = explorer
        self.open: dict[socket.socket, float] = {}  # connections with the deadline of their next request
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:  # OverflowError: the number is too large for a port
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"port {port} cannot be opened ({reason}); name another one with --port") from None

    def process_request(self, request: socket.socket, client_address: object) -> None:
        if len(self.open) >= MAX_CONNECTIONS:
            return self.shutdown_request(request)
        self.expect_request(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.open.pop(request, None)
        super().shutdown_request(request)

    def expect_request(self, connection: socket.socket) -> None:
        self.open[connection] = time.monotonic() + REQUEST_S

    def mark_request_received(self, connection: socket.socket) -> None:
        self.open[connection] = float("inf")

    def service_actions(self) -> None:
        """Close connections whose request is late; `serve_forever` calls this twice a second."""
        now = time.monotonic()
        for connection in [connection for connection, deadline in list(self.open.items()) if deadline < now]:
            with suppress(OSError):  # it was closed in the meantime
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore closed connections: a browser may stop waiting for an image."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def build_address(self, page: str) -> str:
        """Return the address of a page, with the token that it needs."""
        return f"http://{HOST}:{self.server_port}/{self.token}/{quote(page)}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S
    server: Server

    def handle_one_request(self) -> None:
        self.server.expect_request(self.connection)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer only requests with this server's host and token, so that no other web page can read the data."""
        self.server.mark_request_received(self.connection)
        if self.headers.get("Host") != f"{HOST}:{self.server.server_port}":
            return self._refuse(HTTPStatus.FORBIDDEN)
        try:
            parts = urlsplit(self.path)
        except ValueError:  # for example, http://[/
            return self._refuse(HTTPStatus.BAD_REQUEST)
        _, token, path = (parts.path + "//").split("/", 2)
        path = unquote(path).rstrip("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._refuse(HTTPStatus.FORBIDDEN)
        try:
            kind, content = self.server.explorer.answer(path, parse_qs(parts.query))
        except NotFoundError:
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
        """Log nothing, since addresses contain the token."""
