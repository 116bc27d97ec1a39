"""A model on a server with OpenAI's chat completions, as vLLM, SGLang and `transformers serve` offer them.

It uses httpx and not the library `openai`. That library repeats requests by itself, so that budgets would not count
them and other requests would not learn that the server is busy. It also returns any JSON as an answer.
"""

import logging
import math
import os
import re
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime

import httpx

from dj2mgm.config.endpoints import SHORTEST_SECRET, spellings_of
from dj2mgm.errors import InputError
from dj2mgm.messages import note

from .chat_answer import QUOTES_KEY, ChatAnswer, read_answer, read_tokens
from .deadlines import keep_deadlines

CONNECT_S = 10.0
LONGEST_PAUSE_S = 600.0  # longest pause that a server may request; during a longer one the stage would hold its GPUs
BUSY, TRY_AGAIN = {429, 503}, {408, 409, 425, 429}
NOT_THERE = {502, 503, 504}  # statuses of a proxy without a server
STOP = {402, 404, 405}  # no credit; no such model or address
MOST_BYTES = 4 * 2**20  # in an answer; a caption takes a few kilobytes
PATIENCE = 10  # factor on `timeout_s` for a whole answer
SHOWN_MODELS = 10
SHOWN_CHARACTERS = 150


class Failure(Exception):
    """A request without an answer."""

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0, busy: bool = False, tokens: int = 0):
        """Initialize the error.

        Args:
            reason: reason for the message.
            again: whether the request may succeed if it is sent again.
            wait_s: pause in seconds that the server requests before that.
            busy: whether the server has too many requests.
            tokens: tokens that the server has counted nevertheless.
        """
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s
        self.busy = busy
        self.tokens = tokens


class ChatServer:
    """A model on a server. Each thread sends one request at a time.

    The key is read from the environment and is only put into a header of the requests.
    """

    def __init__(self, base_url: str, model: str, key_variable: str | None, connections: int, timeout_s: float):
        """Read the key and prepare the connections.

        Args:
            base_url: address without a final slash.
            model: name of the model on the server.
            key_variable: environment variable with the key (None: no key is sent).
            connections: largest number of connections.
            timeout_s: longest silence in seconds, and longest time until the head of an answer. A whole answer may take
                `PATIENCE` times as long.

        Raises:
            InputError: If the value of the variable cannot be a key.
        """
        for library in ("httpx", "httpcore"):  # they log a line for each request, httpcore with its headers
            logging.getLogger(library).setLevel(logging.WARNING)
        self.model = model
        self.name = f"{base_url} (model {model})"
        self._key_variable = key_variable
        self._key = _read_key(key_variable)
        self._key_written = spellings_of(self._key)
        self._timeout_s = timeout_s
        self._has_answered = False
        self._client = httpx.Client(
            base_url=f"{base_url}/",
            # a compressed answer would have to be decompressed to know its size
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._deadlines = keep_deadlines(self._client)

    def check_model(self) -> None:
        """Check that the server lists the model; a server without a list is accepted.

        Raises:
            Failure: If the server does not answer.
            InputError: If the server needs another key, has only other models, or is not a chat server.
        """
        response = self._request("GET", "models")
        if response.status_code in NOT_THERE | TRY_AGAIN:
            raise self._make_failure(response)
        self._check_key(response)
        if not response.is_success:
            note(
                f"{self.name}: the list of models is missing ({response.status_code}); the first answer will show more"
            )
            return
        values = _json(response)
        if not isinstance(values, dict) or not isinstance(values.get("data"), list):
            raise InputError(
                f"{self.name}: expected a list of models, found {self._quote(response)}. Correct base_url, which often "
                "ends in /v1"
            )
        listed = [str(model.get("id")) for model in values["data"] if isinstance(model, dict)]
        if listed and self.model not in listed:
            shown = ", ".join(map(self._shown, listed[:SHOWN_MODELS]))
            more = f" and {len(listed) - SHOWN_MODELS} more" if len(listed) > SHOWN_MODELS else ""
            raise InputError(f"{self.name}: the server does not list this model, but {shown}{more}. Name one of these")
        if not listed:
            note(f"{self.name}: the server lists no models; the first answer will show whether it has this one")

    def complete(self, content: list[dict], **settings) -> ChatAnswer:
        """Return the answer to one message of a user.

        Args:
            content: parts of the message, as in OpenAI's chat completions.
            settings: further settings of a chat completion, such as max_tokens.

        Raises:
            Failure: If there is no answer this time.
            InputError: If no message would get an answer.
        """
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **settings}
        response = self._request("POST", "chat/completions", json=body)
        self._check_key(response)
        if response.is_redirect or response.status_code in STOP:
            raise InputError(
                f"{self.name}: expected a caption, found {self._quote(response)}. Correct model or base_url, which "
                "often ends in /v1, or check the account"
            )
        if not response.is_success:
            raise self._make_failure(response)
        values = _json(response)
        answer = read_answer(values)
        if answer is None:
            raise Failure(f"{self._quote(response)}, which is not a chat completion", tokens=read_tokens(values) or 0)
        self._has_answered = True
        return self._without_key(answer)

    def _request(self, method: str, path: str, **body) -> httpx.Response:
        content, whole_s = bytearray(), PATIENCE * self._timeout_s
        self._deadlines.start(whole_s, head_s=self._timeout_s)
        try:
            with self._client.stream(method, path, **body) as response:
                self._deadlines.head_has_come()
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise Failure("a compressed answer, although the request excludes it", again=False)
                for part in response.iter_raw():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise Failure(f"an answer of more than {MOST_BYTES >> 20} MiB", again=False)
            return httpx.Response(response.status_code, headers=response.headers, content=bytes(content))
        except httpx.TimeoutException:
            late = time.monotonic() >= self._deadlines.whole
            raise Failure(
                f"no whole answer in {whole_s:g} s" if late else f"no answer in {self._timeout_s:g} s"
            ) from None
        except httpx.HTTPError as error:
            raise Failure(f"no answer ({self._shown(str(error) or type(error).__name__)})") from None

    def _without_key(self, answer: ChatAnswer) -> ChatAnswer:
        """Mask the key in an answer, since answers are kept on disk and become captions."""
        if len(self._key) < SHORTEST_SECRET or not self._key_written.search(answer.text):
            return answer
        return replace(answer, text=self._key_written.sub("<key>", answer.text), problem=QUOTES_KEY)

    def _check_key(self, response: httpx.Response) -> None:
        """Check that the server has accepted the key.

        Raises:
            InputError: If it needs another key. Its answer is not quoted, since it may contain the key.
        """
        status = response.status_code
        if status != 401 and (status != 403 or self._has_answered):
            return
        variable = self._key_variable or "a variable of the environment and its name into key_variable"
        if self._key:
            raise InputError(f"{self.name}: the server rejects the key in {variable} ({status}). Put another one there")
        raise InputError(f"{self.name}: the server needs a key ({status}). Put one into {variable}")

    def _make_failure(self, response: httpx.Response) -> Failure:
        """Return the failure that the response stands for.

        Raises:
            InputError: If the server requests a long pause, or reports that the account has no credit.
        """
        status, wait_s = response.status_code, _retry_after_s(response)
        if wait_s > LONGEST_PAUSE_S or "insufficient_quota" in response.text:
            wait = f" and requests a pause of {wait_s:.0f} s" if wait_s else ""
            raise InputError(
                f"{self.name}: the server answers {self._quote(response)}{wait}. Run again when it allows more requests"
            )
        again, tokens = status >= 500 or status in TRY_AGAIN, read_tokens(_json(response)) or 0
        return Failure(self._quote(response), again, wait_s, status in BUSY, tokens)

    def _quote(self, response: httpx.Response) -> str:
        """Return the status and the beginning of the server's answer."""
        return f"{response.status_code} {self._shown(response.text)}"

    def _shown(self, text: str) -> str:
        """Return the beginning of an external text on one line, in quotes and without the key."""
        hidden = self._key_written.sub("<key>", text) if self._key else text
        return repr(" ".join(hidden.split())[:SHOWN_CHARACTERS])


def _read_key(variable: str | None) -> str:
    """Return the key in an environment variable, or an empty string.

    Raises:
        InputError: If the value cannot be a key. A later error of httpx would show it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not re.fullmatch(r"[!-~]*", key):
        raise InputError(f"the environment variable {variable} is not a key: keys have no blanks or umlauts")
    return key


def _json(response: httpx.Response) -> object:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _retry_after_s(response: httpx.Response) -> float:
    """Return the pause in seconds from the header Retry-After (seconds or a date), or 0 without one."""
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
