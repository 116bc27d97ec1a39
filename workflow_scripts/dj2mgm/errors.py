"""Error that a user can fix; any other exception is a defect of the workflow and keeps its traceback."""

import json
import re
from typing import Any, Self

LONG_WORD = re.compile(r"\S{401,}")  # longer than paths are


class InputError(Exception):
    """Mistake in the input: one sentence with the problem, its location (file and row, or key) and the remedy.

    Further arguments are texts that Snakemake's console prints on lines of their own, such as lines to copy.
    """

    def __str__(self) -> str:
        return " ".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """Texts for lines of their own."""
        return [shorten_words(str(argument)) for argument in self.args]

    def with_origin(self, origin: str) -> Self:
        """Return the same error with a text before it."""
        first, *others = self.args
        return type(self)(f"{origin}{first}", *others)


class UnsuitableDatasetError(InputError):
    """Mistake only if the experiment is requested: its recipe is for datasets with other parts."""


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quote_value(value: Any) -> str:
    """Return a value for a message: short, and written as in YAML."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 100 else f"{text[:70]}…{text[-20:]}"


def shorten_words(text: str) -> str:
    """Return a text without the middle of long words, such as an image in base64."""
    return LONG_WORD.sub(lambda match: f"{match.group()[:70]}…{match.group()[-20:]}", text)
