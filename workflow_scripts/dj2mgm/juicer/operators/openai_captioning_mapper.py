"""Asks a server's vision-language model for captions, by OpenAI's chat completions over HTTP.

    process:
      - low_similarity_recaption_mapper:
          keep_fraction: 0.5
          captioner:
            openai_captioning_mapper: {base_url: "http://localhost:8000/v1", model: Qwen/Qwen3-VL-8B-Instruct}

A captioner only, not a step of its own: `low_similarity_recaption_mapper` keeps each answer as it arrives.
"""

import base64
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from io import BytesIO
from typing import TYPE_CHECKING

from data_juicer.ops.base_op import OPERATORS, UNFORKABLE, Mapper

from dj2mgm.config.endpoints import ADDRESS, VARIABLE, is_address, is_variable, one_address
from dj2mgm.data.images import BadImage, load_image
from dj2mgm.errors import InputError

from .declarations import merge_reports
from .models.captioner import Captions

if TYPE_CHECKING:
    from .models.chat_answer import Answer
    from .models.chat_requests import ChatRequests

NAME = "openai_captioning_mapper"
JPEG_QUALITY = 90


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class OpenAICaptioningMapper(Mapper):
    """Captions images by asking a server about many of them at the same time.

    The same image gets the answer that was kept, whatever the seed: answers are paid for. Log-likelihoods are not told.
    """

    _batched_op = True
    draws_at_random = False
    in_one_process = True
    without_effect = {"key_variable", "concurrency", "timeout_s", "retries", "max_requests", "max_total_tokens"}
    report_key = "server"

    def __init__(
        self,
        base_url: str = "http://localhost:8000/v1",
        model: str = "",
        key_variable: str | None = "OPENAI_API_KEY",
        question: str = "Describe the image in one sentence.",
        max_tokens: int = 128,
        temperature: float = 0.0,
        longest_side: int = 768,
        concurrency: int = 32,
        timeout_s: float = 60.0,
        retries: int = 5,
        max_requests: int | None = None,
        max_total_tokens: int | None = None,
        *args,
        **kwargs,
    ):
        """
        Initialization method.

        :param base_url: what `chat/completions` is appended to.
        :param model: its name on the server.
        :param key_variable: of the environment, with the server's key; without such a variable no key is sent.
        :param question: what is asked about each image.
        :param max_tokens: of an answer; one that is cut off there is not used.
        :param temperature: of the model.
        :param longest_side: pixels; larger images are scaled down.
        :param concurrency: requests in flight.
        :param timeout_s: seconds of silence after which a request has failed.
        :param retries: of a request that has failed.
        :param max_requests: budget, over all runs with the same captions.
        :param max_total_tokens: budget, over all runs with the same captions.
        """
        super().__init__(*args, **kwargs)
        if not is_address(base_url):
            raise InputError(f"{NAME}: 'base_url' must {ADDRESS}")
        if key_variable is not None and not is_variable(key_variable):
            raise InputError(f"{NAME}: 'key_variable' must {VARIABLE}")
        if not model:
            raise InputError(f"{NAME}: 'model' is missing; name one of {base_url}/models")
        self.base_url = one_address(base_url)
        self.model = model
        self.key_variable = key_variable
        self.question = question
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.longest_side = longest_side
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.retries = retries
        self.max_requests = max_requests
        self.max_total_tokens = max_total_tokens
        self.report: dict[str, int] = {}
        self._requests: ChatRequests | None = None

    @staticmethod
    def model_files(arguments: dict) -> list:
        """None: `model` is a name, even where a folder is called so."""
        return []

    def connect(self, spent: tuple[int, int] = (0, 0)) -> None:
        """Ask the server whether it is there and has the model.

        Args:
            spent: requests and tokens of earlier runs, which count in the budgets.

        Raises:
            InputError: says what it answers, and what to do.
        """
        if self._requests is None:
            from .models.chat_requests import ChatRequests
            from .models.chat_server import ChatServer

            server = ChatServer(self.base_url, self.model, self.key_variable, self.concurrency, self.timeout_s)
            requests = ChatRequests(server, self.retries, self.max_requests, self.max_total_tokens, spent)
            requests.check()
            self._requests = requests

    def captions_as_they_come(self, images: Sequence[str], keep: Callable[[int, Captions], None]) -> None:
        """Hand the place of each image that has got an answer, and its captions, to `keep`; after `connect`.

        Raises:
            InputError: the server answers no more, or a budget is used up; answers on their way are kept before.
            Exception: as `keep` raises it for one answer; the others on their way are handed to it all the same.
        """
        requests, before = self._requests, self._requests.counts()
        stopped: Exception | None = None
        cores = len(os.sched_getaffinity(0))  # as many whole images in memory, however many requests are in flight
        with ThreadPoolExecutor(cores) as encoders, ThreadPoolExecutor(self.concurrency) as threads:
            places = {threads.submit(self._ask, image, encoders): place for place, image in enumerate(images)}
            try:
                for asked in as_completed(places):
                    try:
                        if answer := asked.result():
                            keep(places[asked], Captions([answer.text], None, answer.problem, answer.tokens))
                    except Exception as error:
                        stopped = stopped or error
                        requests.stop()
            finally:  # also where this process is interrupted
                if any(not asked.done() for asked in places):
                    requests.stop()
        if isinstance(stopped, InputError):
            raise InputError(f"{stopped} ({requests.account()})")
        if stopped:
            raise stopped
        self.report = merge_reports(self.report, {key: value - before[key] for key, value in requests.counts().items()})

    def process_batched(self, samples: dict) -> dict:
        raise InputError(
            f"{NAME} is no step of its own: name it as the captioner of low_similarity_recaption_mapper, which keeps "
            "what has been paid for"
        )

    def _ask(self, image: str, encoders: Executor) -> "Answer | None":
        if self._requests.stopped:
            return None
        picture = {"type": "image_url", "image_url": {"url": encoders.submit(self._data_url, image).result()}}
        content = [picture, {"type": "text", "text": self.question}]
        return self._requests.ask(content, max_tokens=self.max_tokens, temperature=self.temperature)

    def _data_url(self, image: str) -> str:
        """The image as the workflow sees it, in a JPEG of at most `longest_side`."""
        try:
            picture = load_image(image, self.longest_side)
        except BadImage as error:
            raise InputError(f"{error}; take its row out of the data") from None
        picture.thumbnail((self.longest_side, self.longest_side))
        written = BytesIO()
        picture.save(written, "JPEG", quality=JPEG_QUALITY)
        return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
