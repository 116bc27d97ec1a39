"""A model on a server with OpenAI's chat completions, as vLLM, SGLang and `transformers serve` offer them.

It uses httpx2 and not the library `openai`. That library repeats requests by itself, so that budgets would not count
them and other requests would not learn that the server is busy. It also returns any JSON as an answer.
"""

import logging
import os
import re
import time
from dataclasses import dataclass, replace
from http.cookiejar import DefaultCookiePolicy

import httpx2

from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError
from dj2mgm.servers.connections import (
    MAX_PAUSE_S,
    PROXY_NEEDS_PASSWORD,
    TooLongAnswerError,
    find_proxy,
    is_compressed,
    keep_deadlines,
    limit_bytes,
    make_client,
    read_retry_after,
)
from dj2mgm.settings.string_formats import MAX_TOKENS, MIN_SECRET_LENGTH, compile_secret_pattern

REFUSED, CUT_OFF, CONTROL_CHARACTER, QUOTES_KEY = "refused", "cut off", "control character", "quotes the key"
TOO_LONG = "too long"
MAX_TEXT_LENGTH = 2**17  # characters of a usable answer
THOUGHTS_PATTERN = re.compile(r"\A.*</think>", re.DOTALL)  # some chat templates put the opening tag into the question
# lone surrogates (which UTF-8 cannot encode), C0 and C1, and characters that change the direction of the text
UNUSABLE = re.compile(r"[\ud800-\udfff\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class ChatAnswer:
    """A text from the server, possibly empty."""

    text: str  # on one line
    # `refused` (by the server's content filter or the model), `cut off` (at `max_tokens`, or within the model's
    # thoughts), `too long` (cut), `control character` (replaced in the text), `quotes the key` (masked), or None
    problem: str | None
    tokens: int | None  # tokens of image, question and answer as counted by the server; None if it does not report them


def read_answer(values: object) -> ChatAnswer | None:
    """Return the first choice of a chat completion, on one line and without thoughts; None if it is not one."""
    match values:
        case {"choices": [{"message": {**message}, **choice}, *_]}:
            text = _read_text(message.get("content"))
        case _:
            return None
    if text is None:
        return None
    reason = choice.get("finish_reason")
    text = " ".join(THOUGHTS_PATTERN.sub("", text).split())
    problem = None
    if reason == "content_filter" or message.get("refusal"):
        problem = REFUSED
    elif reason == "length" or text.startswith("<think>"):
        problem = CUT_OFF
    elif len(text) > MAX_TEXT_LENGTH:
        problem = TOO_LONG
    elif UNUSABLE.search(text):
        problem = CONTROL_CHARACTER
    return ChatAnswer(UNUSABLE.sub("\N{REPLACEMENT CHARACTER}", text), problem, read_token_count(values))


def read_token_count(values: object) -> int | None:
    """Return the tokens that the server has counted, even for an invalid completion; None if it reports none."""
    usage = values.get("usage") if isinstance(values, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens <= MAX_TOKENS else None


def _read_text(content: object) -> str | None:
    """Return a message's text, joined from its text parts; None if the content is invalid."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content or "" if isinstance(content, str | None) else None


CONNECT_S = 10.0
BUSY, TRY_AGAIN = {429, 503}, {408, 409, 425, 429}
NOT_THERE = {502, 503, 504}  # statuses of a proxy without a server
FINAL_STATUS_CODES = {402, 404, 405}  # no credit; no such model or address
MAX_BYTES = 4 * 2**20  # bytes of an answer; a caption takes a few kilobytes
KEPT_CHARACTERS = 1000  # of an answer that is too long, since answers are kept on disk
TIMEOUT_FACTOR = 10  # factor on `timeout_s` for a whole answer
SHOWN_MODELS = 10
MAX_MODEL_LENGTH = 200  # characters of a model's name
SHOWN_CHARACTERS = 150


class RequestError(Exception):
    """A request without an answer."""

    def __init__(self, reason: str, can_retry: bool = True, wait_s: float = 0.0, busy: bool = False, tokens: int = 0):
        """Initialize the error.

        Args:
            reason: reason for the message.
            can_retry: whether the request may succeed if it is sent again.
            wait_s: pause in seconds that the server requests before that.
            busy: whether the server has too many requests.
            tokens: tokens that the server has counted nevertheless.
        """
        super().__init__(reason)
        self.can_retry = can_retry
        self.wait_s = wait_s
        self.busy = busy
        self.tokens = tokens


class ChatServer:
    """A model on a server. Each thread sends one request at a time.

    The key is read from the environment and is only put into a header of the requests.
    """

    def __init__(self, base_url: str, model: str | None, key_variable: str | None, connections: int, timeout_s: float):
        """Read the key and prepare the connections.

        Args:
            base_url: address without a final slash.
            model: name of the model on the server; None: `check_model` finds the only model that the server lists.
            key_variable: environment variable with the key (None: no key is sent).
            connections: largest number of connections.
            timeout_s: longest silence in seconds, and longest time until the head of an answer. A whole answer may take
                `TIMEOUT_FACTOR` times as long.
        """
        for library in ("httpx2", "httpcore2"):  # they log a line for each request, httpcore2 with its headers
            logging.getLogger(library).setLevel(logging.WARNING)
        self._base_url = base_url
        self._key_variable = key_variable
        self._key = _read_key(key_variable)
        self._key_pattern = compile_secret_pattern(self._key)
        self._timeout_s = timeout_s
        self._has_answered = False
        self._client = make_client(
            base_url,
            base_url=f"{base_url}/",
            # a compressed answer would have to be decompressed to know its size
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # keeps no cookies
        self._proxy = find_proxy(self._client, base_url)
        self._deadlines = keep_deadlines(self._client)
        self._name_model(model)

    def check_model(self) -> None:
        """Check that the server lists the model, or find the only one. A server without a list is accepted.

        Raises:
            RequestError: if the server does not answer.
            InputError: the server needs another key, has only other models, is not a chat server, or no model
                is named, and the server does not list exactly one.
        """
        response = self._request("GET", "models")
        if response.status_code in NOT_THERE | TRY_AGAIN:
            raise self._make_failure(response)
        self._check_key(response)
        if not response.is_success and self.model is None:
            raise InputError(f"{self.name}: the list of models is missing ({response.status_code}); name a model")
        if not response.is_success:
            note(
                f"{self.name}: the list of models is missing ({response.status_code}); the first answer will show more"
            )
            return
        values = _parse_json(response)
        if not isinstance(values, dict) or not isinstance(values.get("data"), list):
            raise InputError(
                f"{self.name}: expected a list of models, found {self._quote(response)}. Correct base_url, which often "
                "ends in /v1"
            )
        models = [str(model.get("id")) for model in values["data"] if isinstance(model, dict)]
        if self.model is None and len(models) == 1:
            if len(models[0]) > MAX_MODEL_LENGTH or not models[0].isprintable():
                raise InputError(
                    f"{self.name}: the server lists {self._sanitize(models[0])}, no valid name; name a model"
                )
            self._name_model(models[0])
        if self.model is None and not models:
            raise InputError(f"{self.name}: the server lists no models; name one")
        if models and self.model not in models:
            shown = ", ".join(map(self._sanitize, models[:SHOWN_MODELS]))
            more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
            problem = f"lists {shown}{more}" if self.model is None else f"does not list this model, but {shown}{more}"
            raise InputError(f"{self.name}: the server {problem}. Name one of these")
        if not models:
            note(f"{self.name}: the server lists no models; the first answer will show whether it has this one")

    def _name_model(self, model: str | None) -> None:
        self.model = model
        details = [f"model {model}"] * (model is not None) + [f"through the proxy {self._proxy}"] * bool(self._proxy)
        self.name = f"{self._base_url} ({', '.join(details)})" if details else self._base_url

    def complete(self, content: list[dict], **settings) -> ChatAnswer:
        """Return the answer to one message of a user, whose `content` has the parts of OpenAI's chat completions.

        Raises:
            RequestError: if there is no answer this time.
            InputError: no message would get an answer.
        """
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **settings}
        response = self._request("POST", "chat/completions", json=body)
        self._check_key(response)
        if response.is_redirect or response.status_code in FINAL_STATUS_CODES:
            raise InputError(
                f"{self.name}: expected an answer, found {self._quote(response)}. Correct model or base_url, which "
                "often ends in /v1, or check the account"
            )
        if not response.is_success:
            raise self._make_failure(response)
        values = _parse_json(response)
        answer = read_answer(values)
        if answer is None:
            raise RequestError(
                f"{self._quote(response)}, which is not a chat completion", tokens=read_token_count(values) or 0
            )
        self._has_answered = True
        answer = self._mask_key(answer)
        return replace(answer, text=answer.text[:KEPT_CHARACTERS]) if len(answer.text) > MAX_TEXT_LENGTH else answer

    def _request(self, method: str, path: str, **body) -> httpx2.Response:
        """Return a response of at most MAX_BYTES; raise RequestError for a late, large, compressed or broken one."""
        whole_s = TIMEOUT_FACTOR * self._timeout_s
        self._deadlines.start(whole_s, head_s=self._timeout_s)
        try:
            with self._client.stream(method, path, **body) as response:
                self._deadlines.mark_head_received()
                if is_compressed(response.headers):
                    raise RequestError("a compressed answer, although the request excludes it", can_retry=False)
                content = b"".join(limit_bytes(response.iter_raw(), MAX_BYTES))
            whole = httpx2.Response(response.status_code, headers=response.headers, content=content)
            whole.encoding = "utf-8"  # the server may name a codec that is not for text, such as zlib
            return whole
        except TooLongAnswerError:
            raise RequestError(f"an answer of more than {MAX_BYTES >> 20} MiB", can_retry=False) from None
        except httpx2.ProxyError as error:
            raise RequestError(f"no way through the proxy ({self._sanitize(str(error))})") from None
        except httpx2.TimeoutException:
            late = time.monotonic() >= self._deadlines.whole
            raise RequestError(
                f"no whole answer in {whole_s:g} s" if late else f"no answer in {self._timeout_s:g} s"
            ) from None
        except httpx2.HTTPError as error:
            raise RequestError(f"no answer ({self._sanitize(str(error) or type(error).__name__)})") from None

    def _mask_key(self, answer: ChatAnswer) -> ChatAnswer:
        """Mask the key in an answer, since answers are kept on disk."""
        if len(self._key) < MIN_SECRET_LENGTH or not self._key_pattern.search(answer.text):
            return answer
        return replace(answer, text=self._key_pattern.sub("<key>", answer.text), problem=QUOTES_KEY)

    def _check_key(self, response: httpx2.Response) -> None:
        """Check that the server has accepted the key. Its answer is not quoted, since it may contain the key."""
        status = response.status_code
        if status == PROXY_NEEDS_PASSWORD:
            raise InputError(
                f"{self.name}: the proxy needs a name and a password (407). Put them into its address in the "
                "environment, or name the server in NO_PROXY"
            )
        if status != 401 and (status != 403 or self._has_answered):
            return
        variable = self._key_variable or "a variable of the environment and its name into key_variable"
        if self._proxy and status == 403:
            raise InputError(
                f"{self.name}: the server or the proxy refuses the request (403). Name the server in NO_PROXY to ask "
                f"it directly, or put another key into {variable}"
            )
        if self._key:
            raise InputError(f"{self.name}: the server rejects the key in {variable} ({status}). Put another one there")
        raise InputError(f"{self.name}: the server needs a key ({status}). Put one into {variable}")

    def _make_failure(self, response: httpx2.Response) -> RequestError:
        """Return the failure that the response stands for; a long pause, or an account without credit, is refused."""
        status, wait_s = response.status_code, read_retry_after(response.headers)
        if wait_s > MAX_PAUSE_S or "insufficient_quota" in response.text:
            wait = f" and requests a pause of {wait_s:.0f} s" if wait_s else ""
            raise InputError(
                f"{self.name}: the server answers {self._quote(response)}{wait}. Run again when it allows more requests"
            )
        can_retry, tokens = status >= 500 or status in TRY_AGAIN, read_token_count(_parse_json(response)) or 0
        return RequestError(self._quote(response), can_retry, wait_s, status in BUSY, tokens)

    def _quote(self, response: httpx2.Response) -> str:
        """Return the status and the beginning of the server's answer."""
        return f"{response.status_code} {self._sanitize(response.text)}"

    def _sanitize(self, text: str) -> str:
        """Return the beginning of an external text on one line, in quotes and without the key."""
        text = text.replace("\0", "")  # in UTF-16 they separate the key's characters
        masked = self._key_pattern.sub("<key>", text) if self._key else text
        return repr(" ".join(masked.split())[:SHOWN_CHARACTERS])


def _read_key(variable: str | None) -> str:
    """Return the key in an environment variable, or an empty string.

    A value that cannot be a key is refused here, because a later error of httpx2 would show it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not re.fullmatch(r"[!-~]*", key):
        raise InputError(f"the environment variable {variable} is not a key: keys have no blanks or umlauts")
    return key


def _parse_json(response: httpx2.Response) -> object:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None
