"""Interface of a model that answers questions, and batches of questions with answers in the original order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from dj2mgm.control_tokens import find_control
from dj2mgm.errors import InputError
from dj2mgm.settings.batch_sizes import AUTO

IMAGES_AT_ONCE = 32  # images per batch of likelihoods
SORTED = 4  # number of batches among which questions are sorted by length
T = TypeVar("T")
Image = str | Path | BytesIO | None  # None: the question is asked without an image
Candidates = list[tuple[str, float]]  # captions of one image, with their log-likelihoods in nats


class QuestionBatch(NamedTuple):
    """Batch of questions, with the index of each question's image."""

    images: list[Image]
    about: list[int]
    questions: list[str]


class GivenAnswer(NamedTuple):
    """Answer whose likelihood is measured, with its question and the index of its image."""

    about: int
    question: str
    text: str


AnswerBatch = tuple[list[Image], list[GivenAnswer]]


class Answerer(ABC):
    """Model that answers questions about images greedily, and measures the likelihood of other answers."""

    def answer(
        self,
        images: Sequence[Image],
        questions: list[str],
        template: str | dict,
        max_new_tokens: int,
        batch_size: int | str,
    ) -> Iterator[str]:
        """Yield one answer for each pair of image and question; an empty question requests a plain caption.

        Args:
            images: One image for each question, or None for all questions, which are then asked without an image
                (PaliGemma receives a black one).
            template: Name or content of a chat format (settings/chat_templates.py), for a model without its own.
            max_new_tokens: Length at which an answer is cut.
            batch_size: Number of questions in a batch, or "auto" for the number that fits the device's memory.
        """
        if batch_size == AUTO:
            batch_size = self.batch_size(max_new_tokens)
        numbers, batches = batch_questions(images, questions, batch_size)
        yield from restore_order(numbers, self.answer_batches(batches, template, max_new_tokens))

    def likelihoods(
        self, images: Sequence[Image], questions: Sequence[str], answers: Sequence[str], template: str | dict
    ) -> Iterator[list[float]]:
        """Yield the log-likelihoods of the tokens of each answer (nats); none if it has a control token.

        Images may be None for all questions, as in `answer`.
        """
        numbers, batches = batch_answers(images, questions, answers)
        yield from restore_order(numbers, self.likelihood_batches(batches, template))

    @abstractmethod
    def batch_size(self, max_new_tokens: int) -> int:
        """Return the batch size for "auto"."""

    @abstractmethod
    def answer_batches(
        self, batches: list[QuestionBatch], template: str | dict, max_new_tokens: int
    ) -> Iterator[list[str]]:
        """Yield the answers of each batch."""

    @abstractmethod
    def likelihood_batches(self, batches: list[AnswerBatch], template: str | dict) -> Iterator[list[list[float]]]:
        """Yield the log-likelihoods of each batch."""


class Generator(Answerer):
    """Trained model in this process, which also writes captions by beam search."""

    def likelihood_batches(self, batches: list[AnswerBatch], template: str | dict) -> Iterator[list[list[float]]]:
        control = self.control_tokens(template)
        for images, answers in batches:
            allowed = [answer for answer in answers if not find_control(answer.text, control)]
            log_likelihoods = dict(zip(allowed, self.log_likelihoods(images, allowed, template), strict=True))
            yield [log_likelihoods.get(answer, []) for answer in answers]

    @abstractmethod
    def candidates(
        self,
        images: Sequence[str | Path],
        question: str,
        template: str | dict,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        """Yield up to `num_beams` different captions for each image, with their log-likelihoods.

        Captions are sorted by beam search's score, the log-likelihood per token. The yielded log-likelihood is the sum
        over a caption's tokens and its stop token.
        """

    @abstractmethod
    def log_likelihoods(
        self, images: Sequence[Image], answers: Sequence[GivenAnswer], template: str | dict
    ) -> list[list[float]]:
        """Return the log-likelihood in nats of each token of each answer, including the tokens that end it.

        Args:
            answers: Answers; those with an empty question are plain captions.
            template: Name or content of a chat format, for a model without its own.
        """

    @abstractmethod
    def control_tokens(self, template: str | dict) -> Collection[str]:
        """Return the format's control tokens, in addition to the tokens of all formats (control_tokens.py)."""

    @abstractmethod
    def close(self) -> None:
        """Free the model's memory, even if other objects still refer to the generator."""


def check_control_tokens(texts: Iterable[str], tokens: Collection[str]) -> None:
    """Check that texts contain no control tokens."""
    for text in texts:
        if token := find_control(text, tokens):
            raise InputError(f"the text {text!r} contains the control token {token}; remove the token")


def image_key(image: Image) -> object:
    return str(image) if isinstance(image, str | Path) else id(image)


def batch_questions(
    images: Sequence[Image], questions: list[str], size: int
) -> tuple[list[list[list[int]]], list[QuestionBatch]]:
    """Batch questions so that questions about one image, and questions of similar length, stay together.

    Questions are sorted by length among `SORTED` batches. A question that repeats for an image is answered once. Either
    all questions or none have an image.

    Returns:
        The numbers of the questions of each answer in each batch, and the batches.
    """
    if None in images and any(image is not None for image in images):
        raise ValueError("questions with and without an image need separate calls")
    numbers: dict[tuple, list[int]] = {}
    groups: dict[object, list[tuple]] = {}  # by image
    files = {image_key(image): image for image in images}
    for number, (image, question) in enumerate(zip(images, questions, strict=True)):
        pair = image_key(image), question
        if pair not in numbers:
            groups.setdefault(pair if image is None else pair[0], []).append(pair)
        numbers.setdefault(pair, []).append(number)
    ordered: list[tuple] = []
    for window in _split_windows(groups.values(), SORTED * size):
        sorted_groups = sorted(window, key=lambda group: max(len(question) for _, question in group))
        ordered += chain(*sorted_groups)
    parts, batches = split_into_parts(ordered, size), []
    for part in parts:
        indices = {key: index for index, key in enumerate(dict.fromkeys(key for key, _ in part))}
        batch_images = [files[key] for key in indices]
        about = [indices[key] for key, _ in part]
        batches.append(QuestionBatch(batch_images, about, [question for _, question in part]))
    return [[numbers[pair] for pair in part] for part in parts], batches


def batch_answers(
    images: Sequence[Image], questions: Sequence[str], answers: Sequence[str]
) -> tuple[list[list[list[int]]], list[AnswerBatch]]:
    """Batch answers so that all answers about `IMAGES_AT_ONCE` images stay together.

    A pair of question and answer that repeats for an image is in a batch once.

    Returns:
        The numbers of the answers of each pair in each batch, and the batches.
    """
    by_image: dict[object, dict[tuple[str, str], list[int]]] = {}
    files = {image_key(image): image for image in images}
    for number, (image, *pair) in enumerate(zip(images, questions, answers, strict=True)):
        by_image.setdefault(image_key(image), {}).setdefault(tuple(pair), []).append(number)
    numbers, batches = [], []
    for part in split_into_parts(list(by_image.items()), IMAGES_AT_ONCE):
        numbers.append([group for _, pairs in part for group in pairs.values()])
        part_answers = [GivenAnswer(index, *pair) for index, (_, pairs) in enumerate(part) for pair in pairs]
        batches.append(([files[key] for key, _ in part], part_answers))
    return numbers, batches


def with_new_images(
    batches: list[QuestionBatch], cache: Container[object], read: Callable[[list[Image]], Iterator[T]]
) -> Iterator[tuple[QuestionBatch, dict[object, T]]]:
    """Yield each batch, with {key: result of `read`} for its images that are missing in the cache.

    The cache may change between batches. `read` maps images to results in order; it receives the missing images of all
    batches and may work ahead.
    """
    files = {image_key(image): image for batch in batches for image in batch.images if image is not None}
    pending = dict.fromkeys(key for key in files if key not in cache)
    results = read([files[key] for key in pending])
    for batch in batches:
        new = {}
        for key in (image_key(image) for image in batch.images if image is not None):
            if key in pending:
                del pending[key]
                new[key] = next(results)
            elif key not in cache:  # no longer cached
                new[key] = next(read([files[key]]))
        yield batch, new


def split_into_parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split items into parts of `size`; the last part may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _split_windows(groups: Iterable[list[tuple]], size: int) -> Iterator[list[list[tuple]]]:
    """Yield lists of consecutive groups with at least `size` members in total."""
    window, count = [], 0
    for group in groups:
        window.append(group)
        count += len(group)
        if count >= size:
            yield window
            window, count = [], 0
    yield window


def restore_order(batches: list[list[list[int]]], answers: Iterable[list[T]]) -> Iterator[T]:
    """Yield answers in the order of the questions, each as soon as all answers before it exist."""
    pending: dict[int, T] = {}
    number = 0
    for batch, texts in zip(batches, answers, strict=True):
        for numbers, text in zip(batch, texts, strict=True):
            pending |= dict.fromkeys(numbers, text)
        while number in pending:
            yield pending.pop(number)
            number += 1
