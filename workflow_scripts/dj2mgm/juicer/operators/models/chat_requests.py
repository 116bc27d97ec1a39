"""Many messages to a server at the same time: tries, pauses, budgets, and when it is time to stop."""

import random
import threading
import time

from dj2mgm.errors import InputError
from dj2mgm.messages import note

from .chat_answer import Answer
from .chat_server import ChatServer, Failure

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # between tries; twice as long each time
BUSY_TRIES = 4  # times as many tries as else, while the server answers others
DOWN_AFTER = 3  # messages in a row without an answer, after all their tries
USELESS_AFTER = 50  # messages in a row whose answer is no caption, or that the server does not take


class ChatRequests:
    """Threads share it.

    Args:
        retries: tries after the first.
        max_requests, max_total_tokens: budgets; None: no limit. They include what was `spent` in other processes.
        spent: requests and tokens.
    """

    def __init__(
        self,
        server: ChatServer,
        retries: int,
        max_requests: int | None,
        max_total_tokens: int | None,
        spent: tuple[int, int],
    ):
        self.server = server
        self.retries = retries
        self.max_requests = max_requests
        self.max_total_tokens = max_total_tokens
        self._before = spent
        self._sent = self._answers = self._tokens = 0  # of this process
        self._in_a_row = {"no answer": 0, "no caption": 0}
        self._useless = ""  # what was wrong with the last answer that is no caption
        self._uncounted = False  # an answer has not told its tokens
        self._told = False  # why an image got no caption
        self._resume_at = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Send no more requests; those on their way are still answered."""
        self._stopped.set()

    def counts(self) -> dict[str, int]:
        """Of this process."""
        with self._lock:
            return {"requests": self._sent, "answers": self._answers, "tokens": self._tokens}

    def account(self) -> str:
        """What has been spent and kept, as the end of a sentence."""
        requests, tokens = self._spent()
        spent = f"{requests} requests and {tokens} tokens so far, over all runs"
        return f"{spent}; {self._answers} answers of this run are kept, and not asked for again"

    def check(self) -> None:
        """Ask whether the server is there and has the model.

        Raises:
            InputError: says what it answers, and what to do.
        """
        for tries in range(1, self.retries + 2):
            try:
                return self.server.check_model()
            except Failure as failure:
                reason = failure
                if tries <= self.retries:
                    self._sleep(tries, failure)
        raise InputError(
            f"{self.server.name}: asked {self.retries + 1} times for its models, and got {reason}; start the server or "
            "correct base_url"
        )

    def ask(self, content: list[dict], **settings) -> Answer | None:
        """The answer to one message; None where there is none after all tries, or the server does not take it.

        Raises:
            InputError: a budget is used up; or other messages would get no answer either. All threads then stop.
        """
        try:
            return self._ask(content, settings)
        except InputError:
            self.stop()
            raise

    def _ask(self, content: list[dict], settings: dict) -> Answer | None:
        tries = failed = 0
        answers = self._answers
        while self._may_go_on():
            self._count_request()
            try:
                answer = self.server.complete(content, **settings)
            except Failure as failure:
                tries += 1
                self._count_tokens(failure.tokens)
                failed += not (failure.busy and self._answers > answers)  # it is only busy, if it answers others
                answers = self._answers
                if not failure.again or failed > self.retries or tries > BUSY_TRIES * (self.retries + 1):
                    self._count_unanswered(failure)
                    return None
                self._sleep(tries, failure)
            else:
                self._count_answer(answer)
                return answer
        return None

    def _may_go_on(self) -> bool:
        """Waits while the server is busy. False where there are to be no more requests."""
        while (left := self._resume_at - time.monotonic()) > 0 and not self.stopped:
            self._stopped.wait(left + random.uniform(0, FIRST_WAIT_S))  # not all threads at once
        return not self.stopped

    def _sleep(self, tries: int, failure: Failure) -> None:
        """Wait before the next try; where the server is busy, so do all threads."""
        backoff = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(tries - 1, 30)) * random.uniform(0.5, 1)
        if failure.busy:
            with self._lock:
                self._resume_at = max(self._resume_at, time.monotonic() + (failure.wait_s or backoff))
        self._stopped.wait(max(backoff, failure.wait_s))

    def _spent(self) -> tuple[int, int]:
        return self._before[0] + self._sent, self._before[1] + self._tokens

    def _count_request(self) -> None:
        """
        Raises:
            InputError: a budget, or what the server has said so far, allows no other request.
        """
        name = self.server.name
        with self._lock:
            limits = {"max_requests": self.max_requests, "max_total_tokens": self.max_total_tokens}
            for (key, limit), spent in zip(limits.items(), self._spent(), strict=True):
                if limit is not None and spent >= limit:
                    raise InputError(f"{name}: {key}: {limit} is used up; raise it (null: no limit) and run again")
            if self.max_total_tokens is not None and self._uncounted:
                raise InputError(
                    f"{name}: it does not tell what its answers cost in tokens, so max_total_tokens cannot be kept; "
                    "set max_requests instead"
                )
            if self._in_a_row["no caption"] >= USELESS_AFTER:
                raise InputError(
                    f"{name}: {USELESS_AFTER} answers in a row are no captions, the last one is {self._useless}; "
                    "change question, max_tokens or model"
                )
            self._sent += 1

    def _count_answer(self, answer: Answer) -> None:
        with self._lock:
            self._answers += 1
            self._tokens += answer.tokens or 0
            self._uncounted |= answer.tokens is None
            self._useless = answer.problem or ("" if answer.text else "empty")
            self._in_a_row = {"no answer": 0, "no caption": self._in_a_row["no caption"] + 1 if self._useless else 0}

    def _count_tokens(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens

    def _count_unanswered(self, failure: Failure) -> None:
        """
        Raises:
            InputError: it is not the images.
        """
        kind, most = ("no answer", DOWN_AFTER) if failure.again else ("no caption", USELESS_AFTER)
        with self._lock:
            if not self._told:
                note(f"{self.server.name}: an image gets no caption: {failure}")
                self._told = True
            self._in_a_row[kind] += 1
            self._useless = str(failure)
            if self._in_a_row[kind] >= most:
                raise InputError(
                    f"{self.server.name}: {most} images in a row got no caption, the last one {failure}; see to the "
                    "server and run again"
                )
