"""A model on a server: chat completions, as OpenAI defined them and vLLM, SGLang and `transformers serve` offer them.

With httpx, and not with the library `openai`: that one repeats requests by itself, where no budget counts them and no
request learns from another that the server is busy, and it hands over any JSON as an answer.
"""

import html
import logging
import math
import os
import re
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime

import httpx

from dj2mgm.errors import InputError
from dj2mgm.messages import note

from .chat_answer import QUOTES_KEY, Answer, answer_of, tokens_of
from .deadlines import keep_deadlines

CONNECT_S = 10.0
LONGEST_PAUSE_S = 600.0  # that a server may ask for; a stage that slept for longer would only hold its GPUs
BUSY, TRY_AGAIN = {429, 503}, {408, 409, 425, 429}
NOT_THERE = {502, 503, 504}  # says a proxy
STOP = {402, 404, 405}  # nothing to pay with; no such model, or no such place
MOST_BYTES = 4 * 2**20  # of an answer; a caption takes a few kilobytes
SHORTEST_SECRET = 8  # characters; a placeholder such as EMPTY may be a word of a caption
PATIENCE = 10  # times `timeout_s`, for an answer as a whole
SHOWN_MODELS = 10
SHOWN_CHARACTERS = 150


class Failure(Exception):
    """A request that has got no answer.

    Args:
        again: whether it may get one if it is sent again.
        wait_s: what the server asks to wait before.
        busy: the server has too many requests.
        tokens: that the server has counted all the same.
    """

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0, busy: bool = False, tokens: int = 0):
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s
        self.busy = busy
        self.tokens = tokens


class ChatServer:
    """Sends one request at a time for each thread that asks.

    The key is read from the environment, goes into a header of the requests, and nowhere else.

    Args:
        base_url: without / at the end.
        key_variable: of the environment; None: no key is sent.
        timeout_s: of silence, and of an answer's head; an answer as a whole may take `PATIENCE` times as long.
    """

    def __init__(self, base_url: str, model: str, key_variable: str | None, connections: int, timeout_s: float):
        """
        Raises:
            InputError: the variable holds something that can be no key.
        """
        for library in ("httpx", "httpcore"):  # a line for each request; of httpcore, with its headers
            logging.getLogger(library).setLevel(logging.WARNING)
        self.model = model
        self.name = f"{base_url} (model {model})"
        self._key_variable = key_variable
        self._key = _key_of(key_variable)
        self._key_written = _spellings_of(self._key)
        self._timeout_s = timeout_s
        self._has_answered = False
        self._client = httpx.Client(
            base_url=f"{base_url}/",
            # a compressed answer would have to be unpacked to know its size
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._deadlines = keep_deadlines(self._client)

    def check_model(self) -> None:
        """Ask for the list of models. A server that has none is taken at its word.

        Raises:
            Failure: it does not answer.
            InputError: it wants another key, has other models only, or is something else.
        """
        response = self._request("GET", "models")
        if response.status_code in NOT_THERE | TRY_AGAIN:
            raise self._failure_of(response)
        self._check_key(response)
        if not response.is_success:
            note(f"{self.name}: its list of models cannot be had ({response.status_code}); the first answer will show")
            return
        values = _json(response)
        if not isinstance(values, dict) or not isinstance(values.get("data"), list):
            raise InputError(
                f"{self.name}: asked for its models, it answers {self._quote(response)}; correct base_url, which often "
                "ends in /v1"
            )
        listed = [str(model.get("id")) for model in values["data"] if isinstance(model, dict)]
        if listed and self.model not in listed:
            shown = ", ".join(map(self._shown, listed[:SHOWN_MODELS]))
            more = f" and {len(listed) - SHOWN_MODELS} more" if len(listed) > SHOWN_MODELS else ""
            raise InputError(f"{self.name}: the server does not list this model, but {shown}{more}; name one of these")
        if not listed:
            note(f"{self.name}: the server lists no models; the first answer will show whether it has this one")

    def complete(self, content: list[dict], **settings) -> Answer:
        """The answer to one message of a user.

        Args:
            settings: as in OpenAI's chat completions, such as max_tokens.

        Raises:
            Failure: there is none this time.
            InputError: no message would get one.
        """
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **settings}
        response = self._request("POST", "chat/completions", json=body)
        self._check_key(response)
        if response.is_redirect or response.status_code in STOP:
            raise InputError(
                f"{self.name}: asked for a caption, it answers {self._quote(response)}; correct model or base_url, "
                "which often ends in /v1, or see to the account"
            )
        if not response.is_success:
            raise self._failure_of(response)
        values = _json(response)
        answer = answer_of(values)
        if answer is None:
            raise Failure(f"{self._quote(response)}, which is no chat completion", tokens=tokens_of(values) or 0)
        self._has_answered = True
        return self._without_key(answer)

    def _request(self, method: str, path: str, **body) -> httpx.Response:
        content, whole_s = bytearray(), PATIENCE * self._timeout_s
        self._deadlines.start(whole_s, head_s=self._timeout_s)
        try:
            with self._client.stream(method, path, **body) as response:
                self._deadlines.head_has_come()
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise Failure("an answer that is compressed, which was not asked for", again=False)
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

    def _without_key(self, answer: Answer) -> Answer:
        """Mask the key in an answer, which would be kept on disk and become a caption."""
        if len(self._key) < SHORTEST_SECRET or not self._key_written.search(answer.text):
            return answer
        return replace(answer, text=self._key_written.sub("<key>", answer.text), problem=QUOTES_KEY)

    def _check_key(self, response: httpx.Response) -> None:
        """
        Raises:
            InputError: the server wants another key. What it says is not quoted, since it may quote the key.
        """
        status = response.status_code
        if status != 401 and (status != 403 or self._has_answered):
            return
        variable = self._key_variable or "a variable of the environment and its name into key_variable"
        if self._key:
            raise InputError(f"{self.name}: it does not take the key in {variable} ({status}); put another there")
        raise InputError(f"{self.name}: it wants a key ({status}); put one into {variable}")

    def _failure_of(self, response: httpx.Response) -> Failure:
        """
        Raises:
            InputError: the server asks to wait for too long, or until somebody has paid.
        """
        status, wait_s = response.status_code, _retry_after_s(response)
        if wait_s > LONGEST_PAUSE_S or "insufficient_quota" in response.text:
            wait = f" and asks to wait for {wait_s:.0f} s" if wait_s else ""
            raise InputError(
                f"{self.name}: it answers {self._quote(response)}{wait}; run again when it allows more requests"
            )
        again, tokens = status >= 500 or status in TRY_AGAIN, tokens_of(_json(response)) or 0
        return Failure(self._quote(response), again, wait_s, status in BUSY, tokens)

    def _quote(self, response: httpx.Response) -> str:
        """Status and beginning of what the server says."""
        return f"{response.status_code} {self._shown(response.text)}"

    def _shown(self, text: str) -> str:
        """The beginning of what comes from outside, on one line, in quotes and without the key."""
        hidden = self._key_written.sub("<key>", text) if self._key else text
        return repr(" ".join(hidden.split())[:SHOWN_CHARACTERS])


def _key_of(variable: str | None) -> str:
    """
    Raises:
        InputError: what the variable holds can be no key; an error further down would show it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not re.fullmatch(r"[!-~]*", key):
        raise InputError(f"the variable {variable} of the environment holds no key: keys have no blanks or umlauts")
    return key


def _spellings_of(key: str) -> re.Pattern:
    """The key as it is, and as JSON, addresses and HTML write its characters."""
    return re.compile("".join(map(_spellings_of_character, key)))


def _spellings_of_character(character: str) -> str:
    code = f"{ord(character):02x}"
    coded = rf"(?i:\\{{1,4}}u00{code}|%(25)?{code}|&#x0{{0,4}}{code};|&#0{{0,4}}{ord(character)};)"
    return rf"(?:{coded}|\\{{0,4}}{re.escape(character)}|{re.escape(html.escape(character))})"


def _json(response: httpx.Response) -> object:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _retry_after_s(response: httpx.Response) -> float:
    """What the header Retry-After asks for, in seconds or as a date; 0 without one."""
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
