"""Batches of questions and answers about images, and their results in the original order."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from dj2mgm.errors import InputError
from dj2mgm.settings.string_formats import find_control_token

IMAGES_AT_ONCE = 32  # images per batch of likelihoods
BATCHES_SORTED_TOGETHER = 4  # number of batches among which questions are sorted by length
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


def check_control_tokens(texts: Iterable[str], tokens: Collection[str]) -> None:
    """Check that texts contain no control tokens."""
    for text in texts:
        if token := find_control_token(text, tokens):
            raise InputError(f"the text {text!r} contains the control token {token}; remove the token")


def make_image_key(image: Image) -> object:
    return str(image) if isinstance(image, str | Path) else id(image)


def batch_questions(
    images: Sequence[Image], questions: list[str], size: int
) -> tuple[list[list[list[int]]], list[QuestionBatch]]:
    """Batch questions so that questions about one image, and questions of similar length, stay together.

    Questions are sorted by length among `BATCHES_SORTED_TOGETHER` batches. A question that repeats for an image is
    answered once. Either all questions or none have an image.

    Returns:
        For each answer of each batch, the numbers of the questions that it answers; and the batches.
    """
    if None in images and any(image is not None for image in images):
        raise ValueError("questions with and without an image need separate calls")
    numbers: dict[tuple, list[int]] = {}
    groups: dict[object, list[tuple]] = {}  # by image
    files = {make_image_key(image): image for image in images}
    for number, (image, question) in enumerate(zip(images, questions, strict=True)):
        pair = make_image_key(image), question
        if pair not in numbers:
            groups.setdefault(pair if image is None else pair[0], []).append(pair)
        numbers.setdefault(pair, []).append(number)
    ordered: list[tuple] = []
    for window in _split_windows(groups.values(), BATCHES_SORTED_TOGETHER * size):
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
    files = {make_image_key(image): image for image in images}
    for number, (image, *pair) in enumerate(zip(images, questions, answers, strict=True)):
        by_image.setdefault(make_image_key(image), {}).setdefault(tuple(pair), []).append(number)
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
    files = {make_image_key(image): image for batch in batches for image in batch.images if image is not None}
    pending = dict.fromkeys(key for key in files if key not in cache)
    results = read([files[key] for key in pending])
    for batch in batches:
        new = {}
        for key in (make_image_key(image) for image in batch.images if image is not None):
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


def cut_at_stop(tokens: list[int], stops: Container[int]) -> list[int]:
    """Return the tokens before the first stop token."""
    return tokens[: next((position for position, token in enumerate(tokens) if token in stops), len(tokens))]
