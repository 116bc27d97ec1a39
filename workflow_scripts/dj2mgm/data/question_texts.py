"""Comparison of texts by their words, and held-out questions that no training row may ask."""

import re
import unicodedata
from collections.abc import Iterable
from itertools import takewhile

NOT_A_WORD = re.compile(r"[\W_]+")
MIN_WORDS = 8  # shorter questions fit many images, so they do not count as leaks


def normalize_words(text: str) -> str:
    """Return the words of a text in lower case, separated by one space."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return NOT_A_WORD.sub(" " if text.isascii() else _separate, text).strip()


def _separate(match: re.Match) -> str:
    """Return the blank between two words, after the combining marks that belong to the first (vowels in Hindi)."""
    text = match.group()
    marks = "".join(takewhile(lambda character: unicodedata.category(character).startswith("M"), text))
    return marks if marks == text else f"{marks} "


def normalize_lines(text: str) -> list[str]:
    """Return the words of a text and of each of its lines, without repetitions.

    A line of a question may be an instruction, such as "Answer with one word.".
    """
    return list(dict.fromkeys(map(normalize_words, (text, *text.splitlines()))))


class EvaluationQuestions:
    """Questions of an evaluation file with their answers; general questions are left out.

    A question is general if it has fewer than `MIN_WORDS` words, or if the file asks it about several images.
    """

    def __init__(self, rows: Iterable[dict] = ()):
        """Read the rows of `read_evaluation`."""
        images: dict[str, set[str]] = {}
        self._pairs: set[tuple[str, str]] = set()
        for row in rows:
            for item in row["questions"]:
                question, answer = normalize_words(item["question"]), normalize_words(item["answer"])
                if len(question.split()) >= MIN_WORDS:
                    images.setdefault(question, set()).add(row["image"])
                    self._pairs |= {(question, answer)} if answer else set()
        self._pairs = {(question, answer) for question, answer in self._pairs if len(images[question]) == 1}

    def has(self, question: str, answer: str) -> bool:
        """Return whether the file has this question, or a line of it, with this answer in any spelling."""
        words = normalize_words(answer)
        return any((line, words) in self._pairs for line in normalize_lines(question))
