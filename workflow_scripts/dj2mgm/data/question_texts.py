"""Texts of questions: comparison without spelling, and held-out questions that no training row may ask."""

import re
import unicodedata
from collections.abc import Iterable

NOT_A_WORD = re.compile(r"[\W_]+")
LEAST_WORDS = 8  # shorter questions fit many images, so they do not count as leaks


def normalize_words(text: str) -> str:
    """Return the words in lower case, separated by one space."""
    return NOT_A_WORD.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


class EvaluationQuestions:
    """Questions of an evaluation file that are about one image only, with their answers."""

    def __init__(self, rows: Iterable[dict] = ()):
        """Read the rows of `formats.read_evaluation`."""
        images: dict[str, set[str]] = {}
        self._asked: set[tuple[str, str]] = set()
        for row in rows:
            for item in row["questions"]:
                question = normalize_words(item["question"])
                if len(question.split()) >= LEAST_WORDS:
                    images.setdefault(question, set()).add(row["image"])
                    self._asked.add((question, normalize_words(item["answer"])))
        self._asked = {(question, answer) for question, answer in self._asked if len(images[question]) == 1}

    def has(self, question: str, answer: str) -> bool:
        return (normalize_words(question), normalize_words(answer)) in self._asked
