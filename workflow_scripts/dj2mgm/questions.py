"""What is asked of a model together, and answers in the order of the questions; how likely it finds answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from dj2mgm.config.training import AUTO
from dj2mgm.control_tokens import find_control
from dj2mgm.errors import InputError

SORTED = 4  # batches whose questions are sorted by length
T = TypeVar("T")
Image = str | Path | BytesIO | None  # None: the question is asked without an image
Candidates = list[tuple[str, float]]  # captions of one image, with their log-likelihoods in nats


class Batch(NamedTuple):
    """Questions that are answered together, and which of the images each is about."""

    images: list[Image]
    about: list[int]
    questions: list[str]


class Answerer(ABC):
    """A trained model that answers questions about images greedily, and writes captions by beam search."""

    def answer(
        self,
        images: Sequence[Image],
        questions: list[str],
        template: str | dict,
        max_new_tokens: int,
        batch_size: int | str,
    ) -> Iterator[str]:
        """One answer for each (image, question); an empty question asks for a plain caption.

        Args:
            images: or None for all questions, which are then asked without an image (PaliGemma is shown a black one).
            template: the name of a chat format, or its content (config/chat_templates.py), for a model without its own.
            batch_size: questions that are answered together, or "auto": as many as the device has memory for.
        """
        if batch_size == AUTO:
            batch_size = self.batch_size(max_new_tokens)
        numbers, batches = batches_of(images, questions, batch_size)
        yield from in_order(numbers, self.answer_batches(batches, template, max_new_tokens))

    @abstractmethod
    def answer_batches(self, batches: list[Batch], template: str | dict, max_new_tokens: int) -> Iterator[list[str]]:
        """The answers of each batch."""

    @abstractmethod
    def batch_size(self, max_new_tokens: int) -> int:
        """Questions that are answered together where that is "auto"."""

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
        """For each image up to `num_beams` different captions, best first by beam search's own score.

        That score is the log-likelihood per token; what is yielded with a caption is the log-likelihood as a whole, of
        its tokens and of the one that ends it.
        """

    @abstractmethod
    def log_likelihoods(
        self, images: Sequence[Image], answers: Sequence[tuple[int, str]], question: str, template: str | dict
    ) -> list[list[float]]:
        """How likely the model finds each answer: nats of each of its tokens, with what ends it, given those before.

        Args:
            answers: which of the images each is about, and its text.
            question: what is asked of all; an empty one asks for a plain caption.

        Raises:
            InputError: an answer holds a control token.
        """

    @abstractmethod
    def control_tokens(self, template: str | dict) -> Collection[str]:
        """What no text may hold, beside what is a control token everywhere (control_tokens.py)."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds, whoever still refers to it."""


def refuse_control(texts: Iterable[str], tokens: Collection[str]) -> None:
    """
    Raises:
        InputError: a text holds a control token.
    """
    for text in texts:
        if token := find_control(text, tokens):
            raise InputError(f"the text {text!r} holds the control token {token}; take it out")


def key_of(image: Image) -> object:
    return str(image) if isinstance(image, str | Path) else id(image)


def batches_of(images: Sequence[Image], questions: list[str], size: int) -> tuple[list[list[list[int]]], list[Batch]]:
    """What is answered together: questions about one image, and of about one length within `SORTED` batches. What is
    asked twice about an image is answered once.

    Returns:
        For each batch the numbers of the questions that its answers answer; and the batches.

    Raises:
        ValueError: some questions are about an image and some about none.
    """
    if None in images and any(image is not None for image in images):
        raise ValueError("questions with an image and without one are asked apart")
    numbers: dict[tuple, list[int]] = {}
    groups: dict[object, list[tuple]] = {}  # by image
    files = {key_of(image): image for image in images}
    for number, (image, question) in enumerate(zip(images, questions, strict=True)):
        pair = key_of(image), question
        if pair not in numbers:
            groups.setdefault(pair if image is None else pair[0], []).append(pair)
        numbers.setdefault(pair, []).append(number)
    ordered: list[tuple] = []
    for window in _windows(groups.values(), SORTED * size):
        longest_last = sorted(window, key=lambda group: max(len(question) for _, question in group))
        ordered += chain(*longest_last)
    parts, batches = parts_of(ordered, size), []
    for part in parts:
        places = {key: place for place, key in enumerate(dict.fromkeys(key for key, _ in part))}
        shown = [files[key] for key in places]
        batches.append(Batch(shown, [places[key] for key, _ in part], [question for _, question in part]))
    return [[numbers[pair] for pair in part] for part in parts], batches


def with_new_images(
    batches: list[Batch], kept: Container[object], read: Callable[[list[Image]], Iterator[T]]
) -> Iterator[tuple[Batch, dict[object, T]]]:
    """Each batch with what `read` makes of those of its images that are not in `kept` by then, by their keys.

    Args:
        read: is handed what all batches lack, and may work ahead.
    """
    files = {key_of(image): image for batch in batches for image in batch.images if image is not None}
    coming = dict.fromkeys(key for key in files if key not in kept)
    reading = read([files[key] for key in coming])
    for batch in batches:
        new = {}
        for key in (key_of(image) for image in batch.images if image is not None):
            if key in coming:
                del coming[key]
                new[key] = next(reading)
            elif key not in kept:  # not any more
                new[key] = next(read([files[key]]))
        yield batch, new


def parts_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Of `size` items each, and the remaining ones."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _windows(groups: Iterable[list[tuple]], size: int) -> Iterator[list[list[tuple]]]:
    """Groups one after another, in lists of about `size` members."""
    window, count = [], 0
    for group in groups:
        window.append(group)
        count += len(group)
        if count >= size:
            yield window
            window, count = [], 0
    yield window


def in_order(batches: list[list[list[int]]], answers: Iterable[list[str]]) -> Iterator[str]:
    """Each answer as soon as it and all before it are there."""
    waiting: dict[int, str] = {}
    number = 0
    for batch, texts in zip(batches, answers, strict=True):
        for numbers, text in zip(batch, texts, strict=True):
            waiting |= dict.fromkeys(numbers, text)
        while number in waiting:
            yield waiting.pop(number)
            number += 1
