"""A captioner that requests captions and answers from a model on a server (OpenAI's chat completions over HTTP).

    process:
      - low_similarity_recaption_mapper:
          keep_fraction: 0.5
          captioner:
            openai_captioning_mapper: {base_url: "http://localhost:8000/v1", model: Qwen/Qwen3-VL-8B-Instruct}

It cannot be a step of a recipe. It is the captioner of operators that keep each answer as it arrives:
`low_similarity_recaption_mapper`, `instruction_synthesis_mapper` and `vlm_rating_filter`.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from data_juicer.ops.base_op import OPERATORS, UNFORKABLE

from dj2mgm.data.images import BadImageError, encode_data_url, load_image
from dj2mgm.errors import InputError
from dj2mgm.juicer.operators.declarations import Captions, ServerCaptioner, argument, merge_reports
from dj2mgm.recipes.catalogue import SERVER_CAPTIONER as NAME
from dj2mgm.settings.string_formats import ADDRESS_RULE, VARIABLE_RULE, is_address, is_variable, normalize_address

if TYPE_CHECKING:
    from dj2mgm.features.servers.chat_requests import ChatRequests
    from dj2mgm.features.servers.chat_server import ChatAnswer

JPEG_QUALITY = 90


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class OpenAICaptioningMapper(ServerCaptioner):
    """A captioner that sends many images to a server at the same time.

    An image keeps its first answer for every seed, since answers may cost money. There are no log-likelihoods.
    """

    _batched_op = True
    draws_at_random = False
    without_effect = frozenset(
        {"key_variable", "concurrency", "timeout_s", "retries", "max_requests", "max_total_tokens"}
    )
    report_key = "server"

    base_url: str = argument("http://localhost:8000/v1", "address to which `chat/completions` is appended")
    model: str = argument("", "name of the model on the server")
    # without the variable no key is sent
    key_variable: str | None = argument("OPENAI_API_KEY", "name of the environment variable with the server's key")
    question: str = argument("Describe the image in one sentence.", "question about each image")
    max_tokens: int = argument(128, "largest number of tokens in an answer. A cut answer is not used")
    temperature: float = argument(0.0, "sampling temperature of the model")
    longest_side: int = argument(768, "longest side of an image in pixels. Larger images are scaled down")
    concurrency: int = argument(32, "number of requests at the same time")
    timeout_s: float = argument(60.0, "seconds of silence after which a request has failed")
    retries: int = argument(5, "number of further tries of a failed request")
    max_requests: int | None = argument(None, "budget over all runs with the same captions")
    max_total_tokens: int | None = argument(None, "budget over all runs with the same captions")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not is_address(self.base_url):
            raise InputError(f"{NAME}: 'base_url' must {ADDRESS_RULE}")
        if self.key_variable is not None and not is_variable(self.key_variable):
            raise InputError(f"{NAME}: 'key_variable' must {VARIABLE_RULE}")
        if not self.model:
            raise InputError(f"{NAME}: 'model' is missing. Name one of {self.base_url}/models")
        self.base_url = normalize_address(self.base_url)
        self._requests: ChatRequests | None = None

    def __getstate__(self) -> dict:
        """Return the state for other processes, which connect by themselves."""
        return self.__dict__ | {"_requests": None}

    @staticmethod
    def list_model_files(arguments: dict) -> list:
        """Return no files: `model` is a name, even if there is a folder of that name."""
        return []

    def connect(self, spent: tuple[int, int] = (0, 0)) -> None:
        """Check that the server answers and has the model; count (requests, tokens) `spent` by earlier runs."""
        if self._requests is None:
            from dj2mgm.features.servers.chat_requests import ChatRequests
            from dj2mgm.features.servers.chat_server import ChatServer

            server = ChatServer(self.base_url, self.model, self.key_variable, self.concurrency, self.timeout_s)
            requests = ChatRequests(server, self.retries, self.max_requests, self.max_total_tokens)
            requests.check()
            self._requests = requests
        self._requests.spent_before = spent

    def request_captions(
        self, images: Sequence[str], keep: Callable[[int, Captions], None], questions: Sequence[str] | None = None
    ) -> None:
        """Pass the index of each answered image, and its captions, to `keep`. Call `connect` first.

        `questions` has one question for each image (None: the question of the arguments for all images).

        Raises:
            InputError: the server no longer answers, or a budget is used up. Pending answers are kept first.
            Exception: any exception of `keep`. The other pending answers are passed to it first.
        """
        requests, counts_before = self._requests, self._requests.get_counts()
        failure: Exception | None = None
        cores = len(os.sched_getaffinity(0))  # limits the decoded images in memory
        with ThreadPoolExecutor(cores) as encoders, ThreadPoolExecutor(self.concurrency) as threads:
            pairs = zip(images, questions or [self.question] * len(images), strict=True)
            indices = {threads.submit(self._ask, *pair, encoders): index for index, pair in enumerate(pairs)}
            try:
                for future in as_completed(indices):
                    try:
                        if answer := future.result():
                            keep(indices[future], Captions([answer.text], None, answer.problem, answer.tokens))
                    except Exception as error:
                        failure = failure or error
                        requests.stop()
            finally:  # also if this process is interrupted
                if any(not future.done() for future in indices):
                    requests.stop()
        if isinstance(failure, InputError):
            raise InputError(f"{failure} ({requests.describe_spending()})")
        if failure:
            raise failure
        self.report = merge_reports(
            self.report, {key: value - counts_before[key] for key, value in requests.get_counts().items()}
        )

    def process_batched(self, samples: dict) -> dict:
        raise InputError(
            f"{NAME} cannot be a step of a recipe. Name it as the captioner of low_similarity_recaption_mapper or "
            "of another operator that keeps paid answers"
        )

    def _ask(self, image: str, question: str, encoders: Executor) -> "ChatAnswer | None":
        if self._requests.stopped:
            return None
        image_part = {"type": "image_url", "image_url": {"url": encoders.submit(self._encode_image, image).result()}}
        content = [image_part, {"type": "text", "text": question}]
        return self._requests.ask(content, max_tokens=self.max_tokens, temperature=self.temperature)

    def _encode_image(self, image: str) -> str:
        """Return the image, loaded as everywhere in the workflow, as a JPEG of at most `longest_side`."""
        try:
            loaded = load_image(image, self.longest_side)
        except BadImageError as error:
            raise InputError(f"{error}. Remove its row from the data") from None
        loaded.thumbnail((self.longest_side, self.longest_side))
        return encode_data_url(loaded, "JPEG", quality=JPEG_QUALITY)
