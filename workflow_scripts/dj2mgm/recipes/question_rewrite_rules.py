"""Rules that rewrite a question with a known answer into another question.

    What color is the {thing}? = {color} => Is there a {color} {thing}? = yes
    Is there a {color} {thing}? = no => What color is the {thing}? != {color}

`=` is before an answer that is expected, `!=` before one that is not. A name in braces stands for a text of up to 60
characters, which is the same everywhere in the rule. English `a` before braces stands for `an`, too.
"""

import re
from dataclasses import dataclass

SLOT_PATTERN = re.compile(r"(?:\b([Aa]) )?\{([a-z]+)\}")
ANY_WORDS = r"([^{}?!]{1,60}?)"
MAX_SLOTS = 4  # names in braces in a question; each multiplies the number of possible matches
VOWELS = "aeiou"


@dataclass(frozen=True)
class RewrittenQuestion:
    """Another question, with an answer that is right or wrong if the original answer is right."""

    question: str
    answer: str
    expected: bool = True


class Rewrite:
    """A rule that rewrites questions of one form."""

    def __init__(self, rule: str):
        """Read a rule.

        Raises:
            ValueError: it is not well-formed.
        """
        left_side, arrow, right_side = rule.partition(" => ")
        question, _, answer = left_side.rpartition(" = ")
        sign = " != " if " != " in right_side else " = "
        self._question, _, self._answer = right_side.rpartition(sign)
        self._expected = sign == " = "
        if not (arrow and question and answer and self._question and self._answer):
            raise ValueError(f"a rewrite must be 'question = answer => question = answer', found {rule!r}")
        names = SLOT_PATTERN.findall(f"{question} {answer}")
        unknown = {name for _, name in SLOT_PATTERN.findall(right_side)} - {name for _, name in names}
        if unknown or len(names) > MAX_SLOTS:
            problem = f"{{{unknown.pop()}}} is only on its right side" if unknown else f"more than {MAX_SLOTS} braces"
            raise ValueError(f"rewrite {rule!r}: {problem}")
        self._pattern = re.compile(_convert_to_pattern(f"{question}\n{answer}"), re.IGNORECASE)

    def apply(self, question: str, answer: str) -> RewrittenQuestion | None:
        """Return the other question; None if the question has another form."""
        match = self._pattern.fullmatch(f"{question.strip()}\n{answer.strip()}")
        if not match:
            return None
        values = match.groupdict()
        return RewrittenQuestion(_fill(self._question, values), _fill(self._answer, values), self._expected)


def _convert_to_pattern(text: str) -> str:
    parts, end, names = [], 0, set()
    for match in SLOT_PATTERN.finditer(text):
        article, name = match.groups()
        parts.append(re.escape(text[end : match.start()]) + ("an? " if article else ""))
        parts.append(f"(?P={name})" if name in names else ANY_WORDS.replace("(", f"(?P<{name}>", 1))
        names.add(name)
        end = match.end()
    return "".join([*parts, re.escape(text[end:])])


def _fill(text: str, values: dict[str, str]) -> str:
    def fill_slot(match: re.Match) -> str:
        article, name = match.groups()
        if not article:
            return values[name]
        return f"{article}{'n' if values[name][0].lower() in VOWELS else ''} {values[name]}"

    return SLOT_PATTERN.sub(fill_slot, text)
