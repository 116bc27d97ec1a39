"""Server with the endpoints of the Hugging Face hub for pushes and downloads, and with failures on request.

with HubServer() as hub: ...   # HF_ENDPOINT=hub.url, HF_TOKEN=hub_server.TOKEN, HF_HUB_DISABLE_XET=1

It follows the protocol of huggingface_hub 2.4: /api/repos/create, preupload, Git LFS's batch with basic transfers, and
a commit as one request of ndjson lines; for downloads, a repository's description with checksums, its tree, and files
in ranges.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a1B2c3D4" * 4
LARGE = (".safetensors", ".parquet", ".bin", ".tar", ".zip")  # files stored by LFS
REVISION = "01234567" * 5


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commits: list[str] = field(default_factory=list)  # subjects
    card: dict = field(default_factory=dict)
    gated: bool = False  # its files need a token


class HubServer(ThreadingHTTPServer):
    """HTTP server on a free port of this machine.

    Attributes:
        repositories: repositories by kind and name, such as `models/me/mine`.
        fails: function of path and number of a request; it returns the status of a failure, or None.
    """

    daemon_threads = True

    def __init__(self, user: str = "me", fails: Callable[[str, int], int | None] = lambda path, number: None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.user, self.fails = user, fails
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # large files, by sha256
        self.requests: list[str] = []
        self.sent: list[tuple[str, str, int]] = []  # method, file, and the first byte of the requested range
        self.altered: dict[str, bytes] = {}  # contents that do not match the checksum
        self.heads: dict[str, dict[str, str]] = {}  # further or other headers of files' answers, by file
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}  # status, headers and body, by path
        self.described: dict[str, dict] = {}  # values of a repository, and of each of its files, that differ
        self.cut: dict[str, int] = {}  # files whose next answer breaks off after a number of bytes
        self.endless: set[str] = set()  # files whose answers to range requests never end
        self.trickling: set[str] = set()  # files whose answers arrive byte by byte, 20 per second
        self.slow_heads: set[str] = set()  # paths of requests with headers that arrive byte by byte for 100 s

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HubServer

    def do_GET(self):
        self._answer()

    do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815 (names of BaseHTTPRequestHandler)

    def _answer(self):
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = self._chunks()
        hub = self.server
        hub.requests.append(f"{self.command} {path}")
        if status := hub.fails(path, sum(f"{self.command} {path}" == request for request in hub.requests)):
            return self._send(status, {"error": f"planned failure of {path}"})
        if path.startswith("/store/"):
            hub.objects[path.rpartition("/")[2]] = body
            return self._send(200, {})
        if path in hub.answers:
            return self._send_raw(*hub.answers[path])
        if path in hub.slow_heads:
            return self._trickle(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 2000)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.command in ("GET", "HEAD") and path != "/api/whoami-v2":
            return self._read(path, has_token)
        if not has_token:
            return self._send(401, {"error": "Invalid username or password."})
        return self._api(path, body)

    def _read(self, path: str, has_token: bool):
        """Answer /api/<kind>s/<owner>/<name>[/revision/x|/tree/x] and [/datasets]/<owner>/<name>/resolve/x/<file>."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        is_api = parts[0] == "api"
        if is_api:
            parts.pop(0)
        kind = parts.pop(0) if is_api or parts[0] == "datasets" else "models"
        if len(parts) < 2:
            return self._send(404, {"error": "Not found"})
        owner, name, *remainder = parts
        repository = self.server.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None or (repository.private and not has_token):
            return self._send(404 if has_token else 401, {"error": "Repository not found"}, error="RepoNotFound")
        if not is_api:
            if repository.gated and not has_token:
                return self._send(403, {"error": "Access to this repository is restricted."}, error="GatedRepo")
            return self._send_file(repository, "/".join(remainder[2:]))
        entries = [self._entry(repository, file) for file in repository.files]
        changes = self.server.described.get(f"{owner}/{name}", {})
        if remainder[:1] == ["tree"]:
            return self._send(200, [entry | changes for entry in entries])
        siblings = [entry | {"rfilename": entry["path"]} | changes for entry in entries]
        description = {"sha": REVISION, "id": f"{owner}/{name}", "siblings": siblings, "gated": repository.gated}
        return self._send(200, description | {"cardData": repository.card} | changes)

    @staticmethod
    def _entry(repository: Repository, file: str) -> dict:
        content = repository.files[file]
        entry = {"type": "file", "path": file, "size": len(content)}
        entry["oid"] = entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if file.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 100}
        return entry

    def _send_file(self, repository: Repository, file: str):
        if file not in repository.files:
            return self._send(404, {"error": "Entry not found"}, error="EntryNotFound")
        content = self.server.altered.get(file, repository.files[file])
        range_ends = (self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")
        start = int(range_ends[0])
        if range_ends[1]:
            content = content[: int(range_ends[1]) + 1]
        self.server.sent.append((self.command, file, start))
        self.send_response(206 if start or range_ends[1] else 200)
        head = {"ETag": f'"{self._oid(repository, file)}"', "X-Repo-Commit": REVISION}
        for header, value in (head | self.server.heads.get(file, {})).items():
            self.send_header(header, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.command == "GET" and file in self.server.endless and range_ends[1]:
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):  # the client closed the connection
                while True:
                    self.wfile.write(bytes(2**16))
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            end = self.server.cut.pop(file, len(content))
            self.close_connection = end < len(content)
            if file in self.server.trickling:
                self._trickle(content[start:end])
            else:
                self.wfile.write(content[start:end])

    def _send_raw(self, status: int, headers: dict[str, str], body: bytes):
        """Send an answer as it is; without Content-Length it arrives byte by byte."""
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(OSError):  # the client closed the connection
            self.wfile.write(body) if "Content-Length" in headers else self._trickle(body)

    def _trickle(self, content: bytes):
        with suppress(OSError):  # the client closed the connection
            for byte in content:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)

    def _api(self, path: str, body: bytes):
        hub, values = self.server, json.loads(body) if body and not path.endswith("/commit/main") else {}
        if path == "/api/whoami-v2":
            return self._send(200, {"type": "user", "name": hub.user, "orgs": []})
        if path == "/api/repos/create":
            return self._create(values)
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path.endswith("/objects/batch"):
            return self._batch(values)
        _, _, kind, owner, name, *remainder = path.split("/")
        action = remainder[0] if remainder else "info"
        repository = hub.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return self._send(404, {"error": "Repository not found"})
        if action == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": self._oid(repository, file["path"]),
                }
                for file in values["files"]
            ]
            return self._send(200, {"files": modes})
        if action == "commit":
            return self._commit(repository, f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])
        return self._send(200, {"sha": REVISION, "id": f"{owner}/{name}"})

    def _create(self, values: dict):
        owner = values["organization"] or self.server.user
        if owner != self.server.user:
            return self._send(403, {"error": f"You don't have the rights to create a model under {owner}"})
        key = f"{values.get('type', 'model')}s/{owner}/{values['name']}"
        exists = key in self.server.repositories
        private = values.get("visibility") == "private" or values.get("private", False)
        self.server.repositories.setdefault(key, Repository(private))
        return self._send(409 if exists else 200, {"url": f"{self.server.url}/{key}", "error": "already there"})

    def _batch(self, values: dict):
        objects = []
        for requested in values["objects"]:
            answer = {"oid": requested["oid"], "size": requested["size"]}
            if requested["oid"] not in self.server.objects:
                answer["actions"] = {"upload": {"href": f"{self.server.url}/store/{requested['oid']}", "header": {}}}
            objects.append(answer)
        return self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, name: str, lines: list[dict]):
        """Apply a commit, or nothing if a large file was not uploaded."""
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.server.objects.get(value["oid"])
                if content is None or hashlib.sha256(content).hexdigest() != value["oid"]:
                    return self._send(400, {"error": f"{value['path']} was not uploaded"})
                files[value["path"]] = content
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        repository.commits.append(lines[0]["value"]["summary"])
        oid = hashlib.sha1(str(len(repository.commits)).encode()).hexdigest()
        return self._send(200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid})

    @staticmethod
    def _oid(repository: Repository, path: str) -> str | None:
        """Return Git's object id, or the content's SHA-256 for a large file."""
        content = repository.files.get(path)
        if content is None:
            return None
        if path.endswith(LARGE):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _send(self, status: int, values: dict | list, error: str | None = None) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":  # the client would read a body as the next answer
            self.wfile.write(content)

    def log_message(self, *_):
        """Print nothing."""
