"""Requests to the Hugging Face hub, with one sentence for each failure and no token in any message."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from huggingface_hub import HfApi, constants, get_token, logging, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory

from dj2mgm.cli.command_line import escape_control
from dj2mgm.errors import InputError
from dj2mgm.servers.deadlines import keep_deadlines
from dj2mgm.settings.endpoints import compile_secret_pattern

MAX_MESSAGE_LENGTH = 200  # characters shown of a server's message
HEAD_FACTOR = 6  # factor on the library's time limit; the hub lists the files of a large repository within a minute
UNKNOWN_FORM_ERRORS = (
    LookupError,
    TypeError,
    AttributeError,
)  # raised by the hub's library for answers of an unknown form


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
    """Return the hub's interface, whose library prints no warnings of a server unchanged."""
    logging.set_verbosity_error()
    return HfApi()


def limit_waiting() -> None:
    """End requests of the hub's library if the head of the answer does not come in time.

    The library waits without end for an answer of the hub's interface, and for heads that come byte by byte.
    """

    def make_client() -> httpx2.Client:
        client = default_client_factory()
        deadlines = keep_deadlines(client)
        head_s = HEAD_FACTOR * constants.HF_HUB_DOWNLOAD_TIMEOUT
        client.event_hooks["request"].append(lambda request: deadlines.start(float("inf"), head_s))
        client.event_hooks["response"].append(lambda response: deadlines.mark_head_received())
        return client

    set_client_factory(make_client)


@contextmanager
def hub_errors(request: Request) -> Iterator[None]:
    """Turn every failure of the enclosed requests into one sentence."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise InputError(f"{request.repository} cannot be reached while HF_HUB_OFFLINE is set; unset it") from None
    except (OSError, RuntimeError, ValueError, httpx2.HTTPError, *UNKNOWN_FORM_ERRORS) as error:
        raise InputError(_describe(request, _find_cause(error))) from None


def _find_cause(error: BaseException) -> BaseException:
    """Return the cause of a failed transfer, which the hub's library wraps in an error with the file's name."""
    while isinstance(error, RuntimeError) and error.__cause__:
        error = error.__cause__
    return error


def _describe(request: Request, error: BaseException) -> str:
    """Return one sentence about a failed request, with its remedy and without the token."""
    repository, remedy = request.repository, request.retry_remedy
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status, message = error.response.status_code, _shorten(str(error.server_message or ""))
        if status in request.reasons:
            return request.reasons[status].replace("{message}", message)
        if status == 401:
            return "the hub rejects the token; set a valid one as HF_TOKEN, or run `hf auth login`"
        return f"the hub refused {repository} (status {status}: {message}); {remedy}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full, so {repository} was not {request.done}; free space, and run the same command again"
    if isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError):
        return f"the hub cannot be reached ({_shorten(str(error)) or type(error).__name__}); {remedy}"
    if isinstance(error, UNKNOWN_FORM_ERRORS):
        return f"the hub's answer about {repository} is not understood ({type(error).__name__}); {remedy}"
    return f"{repository} could not be {request.done} ({_shorten(str(error)) or type(error).__name__}); {remedy}"


def _shorten(text: str) -> str:
    return clean(" ".join(text.split()))[:MAX_MESSAGE_LENGTH]


def clean(text: str) -> str:
    """Return a server's text on one line, without the token if the server repeats it."""
    if token := get_token():
        text = compile_secret_pattern(token).sub("<token>", text)
    return escape_control(text)
