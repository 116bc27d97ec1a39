"""Requests to the Hugging Face hub, with one sentence for each failure and no token in any message.

The server may be a mirror, so all its answers are limited, and files are read here and not by the hub's library. The
library takes the names of files in its cache from the server, and limits neither time nor size. Every
client of the library that this module makes refuses such names if they may be paths.
"""

import errno
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, logging, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session, parse_ratelimit_headers
from huggingface_hub.utils._http import hf_request_event_hook

from dj2mgm.cli.command_line import REMEDIES, escape_control
from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError
from dj2mgm.servers.connections import (
    LONGEST_PAUSE_S,
    MAX_PAUSE_S,
    MIN_SHOWN_PAUSE_S,
    PROXY_NEEDS_PASSWORD,
    Deadlines,
    TooLongAnswerError,
    find_proxy,
    is_compressed,
    keep_deadlines,
    limit_bytes,
    make_client,
    read_retry_after,
)
from dj2mgm.settings.string_formats import compile_secret_pattern

MAX_MESSAGE_LENGTH = 200  # characters shown of a server's message
HEAD_FACTOR = 6  # factor on the library's time limit; the hub lists the files of a large repository within a minute
BODY_FACTOR = 2  # factor on the library's time limit for an answer's body, in addition to the time for its bytes
MAX_ANSWER_BYTES = 2**27  # bytes of an answer that is not a file; about 400 000 files of a repository
MAX_REFUSAL_BYTES = 2**20  # bytes of a redirect or an error; a client keeps all redirects of an answer
MAX_REDIRECTS = 5
MIN_BYTES_PER_S = 2**12  # rate of the slowest accepted body
BUSY_STATUS_CODES = (408, 429, 500, 502, 503, 504)  # answers after which a file is requested again
PATH_REMEDIES = REMEDIES | dict.fromkeys(
    (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    "Move it away, and run the same command again",
)
MAX_BYTES = "dj2mgm_max_bytes"  # extension of a request with the most bytes of its answer
COMMIT_HEADER = "X-Repo-Commit"
NAME_KEYS = ("sha", "oid", "blobId", "sha256")  # of commits and contents in descriptions of repositories
SHOWN_CHARACTERS = 60  # of a name or path
CONTENT_NAME = re.compile("[0-9A-Fa-f-]{1,64}")  # storages number the parts of a content after a hyphen
UNKNOWN_FORM_ERRORS = (
    LookupError,
    TypeError,
    AttributeError,
)  # raised by the hub's library for answers of an unknown form


class UnreachableHubError(InputError):
    """No answer of the hub, as on a machine without internet."""


@dataclass(frozen=True)
class Request:
    """A transfer of a repository, for the messages of its failures.

    Attributes:
        repository: `owner/name`.
        done: the participle of the transfer, such as "pushed".
        retry_remedy: remedy for a temporary failure.
        reasons: sentences by status of the server's answer; `{message}` stands for the server's text.
    """

    repository: str
    done: str
    retry_remedy: str
    reasons: Mapping[int, str]


def make_quiet_api() -> HfApi:
    """Return the hub's interface with limited answers; its library prints no warnings of a server unchanged."""
    logging.set_verbosity_error()
    set_client_factory(_make_limited_client)
    return HfApi()


def check_hub_answers(request: Request) -> None:
    """Check within the time limit of the hub's library that the hub answers anything at all.

    A network may drop packets silently. Then the system looks each name server and each address of the hub up for
    itself, which takes minutes, and no time limit of a client includes that. So a thread waits for the answer.

    Raises:
        UnreachableHubError: there is no answer, or HF_HUB_OFFLINE is set.
    """
    make_quiet_api()
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, follow_redirects=False))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    with hub_errors(request):
        if not answers:
            raise TimeoutError(f"no answer within {constants.HF_HUB_DOWNLOAD_TIMEOUT} s")
        if isinstance(answers[0], httpx2.TransportError | OSError | OfflineModeIsEnabled):
            raise answers[0]  # after any other error, the hub has answered


def check_library_downloads() -> None:
    """Make the hub's library check the names in answers. Files of any size are allowed.

    Libraries that load a model by its hub id download with it.
    """
    set_client_factory(partial(_make_limited_client, max_bytes=float("inf"), body_timeout_s=float("inf")))


def _make_limited_client(max_bytes: float | None = None, body_timeout_s: float | None = None) -> httpx2.Client:
    """Return a client of the hub's library that checks each answer's head, and limits its time, bytes and pauses.

    Args:
        max_bytes: most bytes of an answer whose request does not state them.
        body_timeout_s: seconds for the body of an answer, in addition to those for its bytes.
    """
    # as the library's `default_client_factory`
    options = {
        "event_hooks": {"request": [hf_request_event_hook]},
        "follow_redirects": True,
        "max_redirects": MAX_REDIRECTS,
        "timeout": None,
    }
    client = make_client(constants.ENDPOINT, headers={"Accept-Encoding": "identity"}, **options)
    deadlines, timeout_s = keep_deadlines(client), constants.HF_HUB_DOWNLOAD_TIMEOUT
    body_timeout_s = body_timeout_s or BODY_FACTOR * timeout_s

    def limit_head(request: httpx2.Request) -> None:
        deadlines.start(float("inf"), HEAD_FACTOR * timeout_s)

    def limit_body(response: httpx2.Response) -> None:
        most = MAX_REFUSAL_BYTES
        if response.is_success:
            most = response.request.extensions.get(MAX_BYTES, max_bytes or MAX_ANSWER_BYTES)
        deadlines.mark_head_received(body_timeout_s)
        _check_answer(response)
        _check_pause(response)
        if is_compressed(response.headers):
            raise ValueError("the answer is compressed, although the request excludes it")
        response.stream = _LimitedStream(response.stream, most, deadlines)

    client.event_hooks["request"].append(limit_head)
    client.event_hooks["response"].append(limit_body)
    return client


class _LimitedStream(httpx2.SyncByteStream):
    """The body of an answer, up to a number of bytes and a deadline that each received byte extends."""

    def __init__(self, stream: httpx2.SyncByteStream, max_bytes: int, deadlines: Deadlines):
        self._stream, self._max_bytes, self._deadlines = stream, max_bytes, deadlines

    def __iter__(self) -> Iterator[bytes]:
        try:
            for part in limit_bytes(self._stream, self._max_bytes):
                self._deadlines.extend(len(part) / MIN_BYTES_PER_S)
                yield part
        except TooLongAnswerError:
            raise ValueError(f"the answer has more than the expected {self._max_bytes} bytes") from None
        except httpx2.TimeoutException:
            if time.monotonic() < self._deadlines.whole:
                raise
            raise ValueError(f"the answer of at most {self._max_bytes} bytes is too slow") from None

    def close(self) -> None:
        self._stream.close()


def _check_answer(response: httpx2.Response) -> None:
    """Raise ValueError if an answer's commits or checksums may be paths, since the hub's library joins them to paths.

    It uses the commit in the head of every answer, also of an error (huggingface_hub 2.4), the checksum in the head of
    the hub's own answers, which state a commit, and both in decoded JSON, which is checked when it is decoded. No
    upstream issue was found.
    """
    names = [response.headers.get(COMMIT_HEADER)]
    if names[0] is not None and not response.is_error:
        etag = response.headers.get("X-Linked-Etag") or response.headers.get("ETag", "")
        names.append(etag.removeprefix("W/").strip('"'))
    _check_names(response, names)
    decode = response.json

    def decode_checked(**options) -> Any:
        try:
            values = decode(**options)
        except ValueError:
            if response.is_success and response.text.lstrip()[:1] == "<":
                raise InputError(
                    f"{response.url.host} answers with a web page instead of the hub's data. If the network has a "
                    "login page, log in with a browser; if HF_ENDPOINT is set, check that it names a hub"
                ) from None
            raise
        _check_names(response, _list_names(values))
        return values

    response.json = decode_checked


def _list_names(values: Any) -> Iterator[object]:
    """Yield the commits and checksums in the description of a repository, or of its files."""
    siblings = values.get("siblings") if isinstance(values, dict) else values
    for entry in (values, *(siblings if isinstance(siblings, list) else ())):
        for part in (entry, entry.get("lfs")) if isinstance(entry, dict) else ():
            if isinstance(part, dict):
                yield from map(part.get, NAME_KEYS)


def _check_names(response: httpx2.Response, names: Iterable[object]) -> None:
    if unusable := next((name for name in names if name and not CONTENT_NAME.fullmatch(str(name))), None):
        file, name = response.url.path[-SHOWN_CHARACTERS:], str(unusable)[:SHOWN_CHARACTERS]
        raise ValueError(f"the server states for {file} {name!r}, which is not a commit or checksum")


def _check_pause(response: httpx2.Response) -> None:
    """Show a pause that the hub requests; raise InputError for one that is too long. The library would obey both."""
    if response.status_code not in BUSY_STATUS_CODES:
        return
    rate = parse_ratelimit_headers(response.headers)
    pause_s = max(read_retry_after(response.headers), min(rate.reset_in_seconds, LONGEST_PAUSE_S) if rate else 0)
    if pause_s > MAX_PAUSE_S:
        raise InputError(f"the hub requests a pause of {pause_s:.0f} s; run the same command again after it")
    if pause_s >= MIN_SHOWN_PAUSE_S:
        note(f"the hub requests a pause of {pause_s:.0f} s")


@contextmanager
def hub_errors(request: Request) -> Iterator[None]:
    """Turn every failure of the enclosed requests into one sentence."""
    try:
        yield
    except OfflineModeIsEnabled:
        message = f"{request.repository} cannot be reached while HF_HUB_OFFLINE is set; unset it"
        raise UnreachableHubError(message) from None
    except (OSError, RuntimeError, ValueError, ArithmeticError, httpx2.HTTPError, *UNKNOWN_FORM_ERRORS) as error:
        cause = _find_cause(error)
        is_silent = isinstance(cause, httpx2.TransportError | ConnectionError | TimeoutError)
        raise (UnreachableHubError if is_silent else InputError)(_describe(request, cause)) from None


def _find_cause(error: BaseException) -> BaseException:
    """Return the cause of a failed transfer, which the hub's library wraps in an error with the file's name."""
    while isinstance(error, RuntimeError) and error.__cause__:
        error = error.__cause__
    return error


def _describe(request: Request, error: BaseException) -> str:
    """Return one sentence about a failed request, with its remedy and without the token."""
    repository, remedy = request.repository, request.retry_remedy
    server_remedy = f"if HF_ENDPOINT is set, check that it names a hub; {remedy}"
    if proxy_failure := _describe_proxy_failure(error):
        return proxy_failure
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status, message = error.response.status_code, _shorten(str(error.server_message or ""))
        if status in request.reasons:
            return request.reasons[status].replace("{message}", message)
        if status == 401:
            return "the hub rejects the token; set a valid one as HF_TOKEN, or run `hf auth login`"
        if status not in BUSY_STATUS_CODES and status < 500:
            remedy = server_remedy
        return f"the hub refused {repository} (status {status}{f': {message}' if message else ''}); {remedy}"
    if isinstance(error, OSError) and error.errno in PATH_REMEDIES:
        path = _shorten(os.fsdecode(error.filename2 or error.filename or ""))
        reason = f"{error.strerror}{f': {path}' if path else ''}"
        return f"{repository} was not {request.done} ({reason}). {PATH_REMEDIES[error.errno]}"
    if isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError):
        return f"the hub cannot be reached ({_shorten(str(error)) or type(error).__name__}); {remedy}"
    if isinstance(error, UNKNOWN_FORM_ERRORS):
        return f"the hub's answer about {repository} is not understood ({type(error).__name__}); {server_remedy}"
    if isinstance(error, ValueError | ArithmeticError | httpx2.HTTPError):  # of the server's answer
        remedy = server_remedy
    return f"{repository} could not be {request.done} ({_shorten(str(error)) or type(error).__name__}); {remedy}"


def _describe_proxy_failure(error: BaseException) -> str | None:
    """Return one sentence about a failure of the environment's proxy, or None if the proxy has not failed.

    A proxy answers requests to `http://` itself; the hub states a code with its own refusals.
    """
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else None
    needs_password = status == PROXY_NEEDS_PASSWORD or str(error).startswith(str(PROXY_NEEDS_PASSWORD))
    may_refuse = status == 403 and response.url.scheme == "http" and "X-Error-Code" not in response.headers
    if not isinstance(error, httpx2.ProxyError) and status != PROXY_NEEDS_PASSWORD and not may_refuse:
        return None
    url = (error if response is None else response).request.url
    proxy = find_proxy(get_session(), str(url))
    if not proxy:
        return None
    if needs_password:
        return (
            f"the proxy {proxy} needs a name and a password (407). Put them into its address in the environment, or "
            "name the hub in NO_PROXY"
        )
    if may_refuse:
        return (
            f"the hub or the proxy {proxy} refuses the request (403). Name the hub in NO_PROXY to ask it directly, or "
            "set a valid token as HF_TOKEN"
        )
    return (
        f"the proxy {proxy} gives no way to the hub ({_shorten(str(error))}). Correct HTTPS_PROXY, or name the hub in "
        "NO_PROXY"
    )


def _shorten(text: str) -> str:
    """Return a message on one line, without the number of a system's error, such as `[Errno -2]`."""
    return clean(" ".join(re.sub(r"\[Errno -?\d+\]", "", text).split()))[:MAX_MESSAGE_LENGTH]


def clean(text: str) -> str:
    """Return a server's text on one line, without the token if the server repeats it."""
    if token := get_token():
        text = compile_secret_pattern(token).sub("<token>", text)
    return escape_control(text)
