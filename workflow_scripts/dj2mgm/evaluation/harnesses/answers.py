"""Answers as the tools count them."""

from collections.abc import Iterable


def cut(answer: str, until: Iterable[str]) -> str:
    """An answer up to the first of the texts that end it, without blanks around it."""
    answer = answer.strip()
    for end in filter(None, until):
        answer = answer.split(end)[0]
    return answer.strip()
