"""Chat completions of a server, as OpenAI defined them and vLLM, SGLang and `transformers serve` offer them.

With httpx, and not with the library `openai`: that one repeats requests by itself, where no budget counts them and no
request learns from another that the server is busy, and it hands over any JSON as an answer.
"""

import math
import os
import random
import re
import threading
import time
from email.utils import parsedate_to_datetime

import httpx

from dj2mgm.errors import InputError
from dj2mgm.messages import note

from .chat_answer import Answer, answer_of

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # between tries; twice as long each time
LONGEST_PAUSE_S = 600.0  # that a server may ask for; a stage that slept for longer would only hold its GPUs
BUSY, TRY_AGAIN = {429, 503}, {408, 409, 425, 429}
NOT_THERE = {502, 503, 504}  # says a proxy
STOP = {402, 404, 405}  # nothing to pay with; no such model, or no such place
CONNECT_S = 10.0
DOWN_AFTER = 3  # messages in a row without an answer, after all their tries
USELESS_AFTER = 50  # messages in a row whose answer is no caption, or that the server does not take
BUSY_TRIES = 4  # as many tries as else, while the server answers others
SHOWN_MODELS = 10


class _Failure(Exception):
    """A request that has got no answer. `again`: whether another may help; `wait_s`: what the server asks for."""

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0, busy: bool = False):
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s
        self.busy = busy


class ChatEndpoint:
    """A model on a server. Threads share it.

    The key is read from the environment, goes into the header of requests, and nowhere else.

    Args:
        key_variable: of the environment; None: no key is sent.
        timeout_s: of silence.
        retries: tries after the first.
        max_requests, max_total_tokens: budgets, with what has been `spent` before: (requests, tokens).
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        key_variable: str | None,
        connections: int,
        timeout_s: float,
        retries: int,
        max_requests: int | None,
        max_total_tokens: int | None,
        spent: tuple[int, int] = (0, 0),
    ):
        """
        Raises:
            InputError: the variable holds something that can be no key.
        """
        self.model = model
        self.name = f"{base_url} (model {model})"
        self.key_variable = key_variable
        self.timeout_s = timeout_s
        self.retries = retries
        self.max_requests = max_requests
        self.max_total_tokens = max_total_tokens
        self.requests, self.tokens = spent
        self._tokens_before = self.tokens
        self.answers = self.sent = 0  # of this process
        self._in_a_row = {"no answer": 0, "no caption": 0}
        self._useless = ""  # what was wrong with the last answer that is no caption
        self._uncounted = False  # an answer has not told its tokens
        self._resume_at = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._key = _key_of(key_variable)
        self._client = httpx.Client(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    def check(self) -> None:
        """Ask the server for its models.

        Raises:
            InputError: it does not answer, wants another key, or has other models only.
        """
        for tries in range(1, self.retries + 2):
            try:
                return self._check()
            except _Failure as failure:
                reason = failure
                if tries <= self.retries:
                    self._sleep(tries, failure)
        raise InputError(
            f"{self.name}: asked {self.retries + 1} times for its models, and got {reason}; start the server or "
            "correct base_url"
        )

    def ask(self, content: list[dict], **settings) -> Answer | None:
        """The answer to one message; None where there is none after all tries, or the server does not take it.

        Raises:
            InputError: a budget is used up; or other messages would get no answer either.
        """
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **settings}
        tries = failed = 0
        answered = self.answers
        while self._may_go_on():
            self._count_request()
            try:
                answer = self._post(body)
            except _Failure as failure:
                tries += 1
                failed += not (failure.busy and self.answers > answered)  # it is only busy, if it answers others
                answered = self.answers
                if not failure.again or failed > self.retries or tries > BUSY_TRIES * (self.retries + 1):
                    self._count_unanswered(failure)
                    return None
                self._sleep(tries, failure)
            else:
                self._count_answer(answer)
                return answer
        return None

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def counts(self) -> dict[str, int]:
        """Of this process."""
        with self._lock:
            return {"requests": self.sent, "answers": self.answers, "tokens": self.tokens - self._tokens_before}

    def account(self) -> str:
        """What has been spent, as the end of a sentence."""
        spent = f"{self.requests} requests and {self.tokens} tokens so far, over all runs"
        return f"{spent}; {self.answers} answers of this run are kept, and not asked for again"

    def stop(self) -> None:
        """Send no more requests; those on their way are still answered."""
        self._stopped.set()

    def _check(self) -> None:
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
            more = f" and {len(listed) - SHOWN_MODELS} more" if len(listed) > SHOWN_MODELS else ""
            raise InputError(
                f"{self.name}: the server does not list this model, but {', '.join(listed[:SHOWN_MODELS])}{more}; name "
                "one of these"
            )
        if not listed:
            note(f"{self.name}: the server lists no models; the first answer will show whether it has this one")

    def _post(self, body: dict) -> Answer:
        """
        Raises:
            _Failure: this request got no answer.
            InputError: no other would get one.
        """
        response = self._request("POST", "chat/completions", json=body)
        self._check_key(response)
        if response.is_redirect or response.status_code in STOP:
            raise self._stop(
                f"asked for a caption, it answers {self._quote(response)}; correct model or base_url, which often "
                "ends in /v1, or see to the account"
            )
        if not response.is_success:
            raise self._failure_of(response)
        answer = answer_of(_json(response))
        if answer is None:
            raise _Failure(f"{self._quote(response)}, which is no chat completion")
        return answer

    def _request(self, method: str, path: str, **body) -> httpx.Response:
        try:
            return self._client.request(method, path, **body)
        except httpx.TimeoutException:
            raise _Failure(f"no answer in {self.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _Failure(f"no answer ({self._without_key(str(error)) or type(error).__name__})") from None

    def _check_key(self, response: httpx.Response) -> None:
        """
        Raises:
            InputError: the server wants another key. What it says is not quoted, since it may quote the key.
        """
        if response.status_code != 401 and (response.status_code != 403 or self.answers):
            return
        variable = self.key_variable or "a variable of the environment and its name into key_variable"
        if self._key:
            raise self._stop(
                f"it does not take the key in {variable} ({response.status_code}); put the right one there"
            )
        raise self._stop(f"it wants a key ({response.status_code}); put one into {variable}")

    def _failure_of(self, response: httpx.Response) -> _Failure:
        """
        Raises:
            InputError: the server asks to wait for too long, or until somebody has paid.
        """
        status, wait_s = response.status_code, _retry_after_s(response)
        if wait_s > LONGEST_PAUSE_S or "insufficient_quota" in response.text:
            wait = f" and asks to wait for {wait_s:.0f} s" if wait_s else ""
            raise self._stop(f"it answers {self._quote(response)}{wait}; run again when it allows more")
        return _Failure(self._quote(response), status >= 500 or status in TRY_AGAIN, wait_s, status in BUSY)

    def _sleep(self, tries: int, failure: _Failure) -> None:
        """Wait before the next try; where the server is busy, so do all threads."""
        backoff = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(tries - 1, 30)) * random.uniform(0.5, 1)
        if failure.busy:
            with self._lock:
                self._resume_at = max(self._resume_at, time.monotonic() + (failure.wait_s or backoff))
        self._stopped.wait(max(backoff, failure.wait_s))

    def _may_go_on(self) -> bool:
        """Waits while the server is busy. False where there are to be no more requests."""
        while (left := self._resume_at - time.monotonic()) > 0 and not self.stopped:
            self._stopped.wait(left + random.uniform(0, FIRST_WAIT_S))  # not all threads at once
        return not self.stopped

    def _count_request(self) -> None:
        """
        Raises:
            InputError: a budget allows no other request.
        """
        with self._lock:
            budgets = {"max_requests": (self.max_requests, self.requests)}
            budgets["max_total_tokens"] = (self.max_total_tokens, self.tokens)
            for key, (limit, spent) in budgets.items():
                if limit is not None and spent >= limit:
                    raise self._stop(f"{key}: {limit} is used up; raise it (null: no limit) and run again")
            if self.max_total_tokens is not None and self._uncounted:
                raise self._stop(
                    "it does not tell what its answers cost in tokens, so max_total_tokens cannot be kept; set "
                    "max_requests instead"
                )
            if self._in_a_row["no caption"] >= USELESS_AFTER:
                raise self._stop(
                    f"{USELESS_AFTER} answers in a row are no captions, the last one is {self._useless}; change "
                    "question, max_tokens or model"
                )
            self.requests += 1
            self.sent += 1

    def _count_answer(self, answer: Answer) -> None:
        with self._lock:
            self.answers += 1
            self.tokens += answer.tokens or 0
            self._uncounted |= answer.tokens is None
            self._in_a_row["no answer"] = 0
            self._useless = answer.problem or ("" if answer.text else "empty")
            self._in_a_row["no caption"] = self._in_a_row["no caption"] + 1 if self._useless else 0

    def _count_unanswered(self, failure: _Failure) -> None:
        """
        Raises:
            InputError: it is not the images.
        """
        kind, most = ("no answer", DOWN_AFTER) if failure.again else ("no caption", USELESS_AFTER)
        with self._lock:
            self._in_a_row[kind] += 1
            if self._in_a_row[kind] >= most:
                raise self._stop(f"{most} images in a row got no caption, the last one {failure}")

    def _stop(self, sentence: str) -> InputError:
        """No thread sends another request; the error that says why."""
        self.stop()
        return InputError(f"{self.name}: {sentence}")

    def _quote(self, response: httpx.Response) -> str:
        """Status and beginning of what the server says, on one line."""
        text = " ".join(self._without_key(response.text).split())
        return f"{response.status_code} {text[:150]!r}"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "<key>") if self._key else text


def _key_of(variable: str | None) -> str:
    """
    Raises:
        InputError: what the variable holds can be no key; an error further down would show it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not re.fullmatch(r"[!-~]*", key):
        raise InputError(
            f"the variable {variable} of the environment holds no key: a key has no blanks and umlauts; set it"
        )
    return key


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
