"""Many questions to a server at the same time, with retries, pauses, budgets, and conditions to stop."""

import random
import threading
import time

from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError
from dj2mgm.features.servers.chat_server import ChatAnswer, ChatServer, RequestError
from dj2mgm.servers.connections import MIN_SHOWN_PAUSE_S

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0  # between tries; doubled each time
BUSY_TRIES = 4  # factor on the tries of a question while the server answers other questions
DOWN_AFTER = 3  # unanswered questions in a row, after which the server counts as down
UNUSABLE_AFTER = 50  # questions in a row that the server rejects, or whose answer is unusable


class ChatRequests:
    """Requests to one server with common budgets, shared by threads.

    Requests and tokens of other processes, `spent_before`, count towards the budgets. A budget of None has no limit.
    """

    def __init__(
        self,
        server: ChatServer,
        retries: int,
        max_requests: int | None,
        max_total_tokens: int | None,
    ):
        self.server = server
        self.retries = retries
        self.max_requests = max_requests
        self.max_total_tokens = max_total_tokens
        self.spent_before = (0, 0)
        self._sent = self._answers = self._tokens = 0  # in this process
        self._in_a_row = {"no answer": 0, "unusable": 0}
        self._last_problem = ""  # problem of the last answer that is unusable
        self._lacks_token_counts = False  # whether the server has sent an answer without its number of tokens
        self._has_noted_failure = False  # whether the user has been told why a question got no answer
        self._resume_at = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Send no more requests; pending ones are still answered."""
        self._stopped.set()

    def get_counts(self) -> dict[str, int]:
        """Return the requests, answers and tokens counted by this process."""
        with self._lock:
            return {"requests": self._sent, "answers": self._answers, "tokens": self._tokens}

    def describe_spending(self) -> str:
        """Return the costs and kept answers, as the end of a sentence."""
        requests, tokens = self._sum_spent()
        spent = f"{requests} requests and {tokens} tokens so far, over all runs"
        return f"{spent}; {self._answers} answers of this run are kept, and not requested again"

    def check(self) -> None:
        """Check that the server answers and has the model."""
        for tries in range(1, self.retries + 2):
            try:
                return self.server.check_model()
            except RequestError as failure:
                reason = failure
                if tries <= self.retries:
                    self._sleep(tries, failure)
        raise InputError(
            f"{self.server.name}: {self.retries + 1} requests for its list of models failed, the last with {reason}. "
            "Start the server or correct base_url"
        )

    def ask(self, content: list[dict], **settings) -> ChatAnswer | None:
        """Return the answer to one question; None if all tries fail, if the server rejects it, or after `stop`.

        Raises:
            InputError: a budget is used up, or other questions would get no answer either. All threads then stop.
        """
        try:
            return self._ask(content, settings)
        except InputError:
            self.stop()
            raise

    def _ask(self, content: list[dict], settings: dict) -> ChatAnswer | None:
        """Return the server's answer after retries; None if the question failed for good, or after `stop`."""
        tries = failed = 0
        answers = self._answers
        while self._may_go_on():
            self._count_request()
            try:
                answer = self.server.complete(content, **settings)
            except RequestError as failure:
                tries += 1
                self._count_tokens(failure.tokens)
                # a busy server that answers other questions has not failed
                failed += not (failure.busy and self._answers > answers)
                answers = self._answers
                if not failure.can_retry or failed > self.retries or tries > BUSY_TRIES * (self.retries + 1):
                    self._count_unanswered(failure)
                    return None
                self._sleep(tries, failure)
            else:
                self._count_answer(answer)
                return answer
        return None

    def _may_go_on(self) -> bool:
        """Wait while the server is busy; return whether another request may be sent."""
        while (remaining := self._resume_at - time.monotonic()) > 0 and not self.stopped:
            self._stopped.wait(remaining + random.uniform(0, FIRST_WAIT_S))  # spreads the threads
        return not self.stopped

    def _sleep(self, tries: int, failure: RequestError) -> None:
        """Wait before the next try; if the server is busy, make all threads wait."""
        backoff = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(tries - 1, 30)) * random.uniform(0.5, 1)
        if failure.busy:
            with self._lock:
                now = time.monotonic()
                if failure.wait_s >= MIN_SHOWN_PAUSE_S and self._resume_at <= now:
                    note(f"{self.server.name}: the server requests a pause of {failure.wait_s:.0f} s: {failure}")
                self._resume_at = max(self._resume_at, now + (failure.wait_s or backoff))
        self._stopped.wait(max(backoff, failure.wait_s))

    def _sum_spent(self) -> tuple[int, int]:
        return self.spent_before[0] + self._sent, self.spent_before[1] + self._tokens

    def _count_request(self) -> None:
        """Count the next request; raise InputError if a budget or the answers so far do not allow it."""
        name = self.server.name
        with self._lock:
            limits = {"max_requests": self.max_requests, "max_total_tokens": self.max_total_tokens}
            for (key, limit), spent in zip(limits.items(), self._sum_spent(), strict=True):
                if limit is not None and spent >= limit:
                    raise InputError(f"{name}: {key}: {limit} is used up. Raise it (null: no limit) and run again")
            if self.max_total_tokens is not None and self._lacks_token_counts:
                raise InputError(
                    f"{name}: the server does not report tokens, so max_total_tokens cannot be kept. Set max_requests "
                    "instead"
                )
            if self._in_a_row["unusable"] >= UNUSABLE_AFTER:
                raise InputError(
                    f"{name}: {UNUSABLE_AFTER} answers in a row are unusable, the last one is {self._last_problem}. "
                    "Change question, max_tokens or model"
                )
            self._sent += 1

    def _count_answer(self, answer: ChatAnswer) -> None:
        with self._lock:
            self._answers += 1
            self._tokens += answer.tokens or 0
            self._lacks_token_counts |= answer.tokens is None
            self._last_problem = answer.problem or ("" if answer.text else "empty")
            self._in_a_row = {"no answer": 0, "unusable": self._in_a_row["unusable"] + 1 if self._last_problem else 0}

    def _count_tokens(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens

    def _count_unanswered(self, failure: RequestError) -> None:
        """Count a question without an answer.

        Raises:
            InputError: more questions in a row have no answer than their images explain.
        """
        kind, limit = ("no answer", DOWN_AFTER) if failure.can_retry else ("unusable", UNUSABLE_AFTER)
        with self._lock:
            if not self._has_noted_failure:
                note(f"{self.server.name}: a question got no answer: {failure}")
                self._has_noted_failure = True
            self._in_a_row[kind] += 1
            self._last_problem = str(failure)
            if self._in_a_row[kind] >= limit:
                raise InputError(
                    f"{self.server.name}: {limit} questions in a row got no answer, the last one {failure}. Repair the "
                    "server and run again"
                )
