"""Kinds of arguments that a recipe may give an operator, as config/schemas/operators.yaml names them.

Recipes are untrusted input. A kind defines the accepted values exactly: a number between bounds, one of a few words,
plain text, or a folder inside one of the allowed folders.

A `rewrite` is a rule that rewrites a question with a known answer into another question (`Rewrite`):

    What color is the {thing}? = {color} => Is there a {color} {thing}? = yes
    Is there a {color} {thing}? = no => What color is the {thing}? != {color}

`=` is before an answer that is expected, `!=` before one that is not. A name in braces stands for a text of up to 60
characters, which is the same everywhere in the rule. English `a` before braces stands for `an`, too.
"""

import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dj2mgm.settings.config_files import MAX_INTEGER, list_config_names
from dj2mgm.settings.string_formats import CONTROL_TOKEN_PATTERN

MAX_NUMBER = 1e15
MAX_TEXT_LENGTH, MAX_PROMPT_LENGTH, MAX_CHARACTERS, MAX_LIST_LENGTH = 200, 4000, 50, 100
PUNCTUATION = ".,;:!?'\"()[]&+#*-"
# characters of `PUNCTUATION` with a meaning in regular expressions, and quotes, which Data-Juicer removes from r'…'
PATTERN_CHARACTERS = set(".?()[]+*'\"")
LAMBDA_PATTERN = re.compile(r"\blambda\b", re.I)
SIZE_PATTERN = re.compile(r"(?P<number>[0-9]{1,15})\s*(?P<unit>KB|KiB|MB|MiB|GB|GiB|TB|TiB)?", re.I)
STATISTIC_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}")
STATISTIC_FIELD = re.compile(rf"__dj__stats__\.{STATISTIC_PATTERN.pattern}")
RANGE_PATTERN = re.compile(r"(?P<type>number|integer)(?: (?P<low>\S*)\.\.(?P<high>\S*))?")
RULE_SIGN, NAME_IN_BRACES = re.compile(r" (?:=>|!?=) "), re.compile(r"\{[a-z]{1,30}\}")
FOLDER_KINDS = ("model", "folder")
SLOT_PATTERN = re.compile(r"(?:\b([Aa]) )?\{([a-z]+)\}")
ANY_WORDS = r"([^{}?!]{1,60}?)"
MAX_SLOTS = 4  # names in braces in a question; each multiplies the number of possible matches
VOWELS = "aeiou"


class Kind(NamedTuple):
    """One kind of argument."""

    expects: str  # end of the sentence "… must be"
    accepts: Callable[[object], bool]


@cache
def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Return the alternatives of an entry, such as `literal or list of literal`."""
    return tuple(_parse_kind(name) for name in text.split(" or "))


def find_problem(text: str, value: object) -> str | None:
    """Return the expected and found values, or None if the value is of the kind."""
    kinds = parse_kinds(text)
    if any(kind.accepts(value) for kind in kinds):
        return None
    return f"must be {' or '.join(kind.expects for kind in kinds)}, found {shorten_value(value)}"


def convert_number(text: str, value: object) -> object:
    """Return a whole number as the kind's Python type, since YAML reads 1 as an int and 3.0 as a float."""
    types = {_find_number_type(name) for name in text.split(" or ")} - {None}
    if type(value) is int and types == {"number"}:
        return float(value)
    if isinstance(value, float) and types == {"integer"} and value.is_integer():
        return int(value)
    return value


def parse_argument_size(size: str) -> int:
    """Return a `size` in bytes; as in Data-Juicer, KB and KiB are both 1024."""
    match = SIZE_PATTERN.fullmatch(size)
    return int(match["number"]) << 10 * " KMGT".index((match["unit"] or " ")[0].upper())


def find_folder_problem(kind: str, value: str, folders: Iterable[str] | None) -> str | None:
    """Return why a folder may not be used, or None if it may.

    Args:
        kind: `model` or `folder`.
        value: the folder.
        folders: folders that may contain it (None: this has been checked before).
    """
    path = Path(os.path.expanduser(value))
    if not os.path.isdir(path):  # Path.is_dir raises OSError for a name that is too long
        remedy = ". Run the experiment that writes it first" if path.parts[:1] == ("results",) else ""
        return f"must be a folder on this machine, found {shorten_value(value)}{remedy}"
    if folders is not None and not any(_is_below(path, folder) for folder in folders):
        return (
            f"must be a folder in results/ or one that the model's file names, found {shorten_value(value)}. Name the "
            "folder in config/models/, for example as `clip`"
        )
    if kind == "model" and not any(
        file.suffix == ".safetensors" for file in (*path.iterdir(), *path.glob("adapter/*"))
    ):
        return f"must be a folder with safetensors weights, and {path} has none"
    return None


def _is_below(path: Path, folder: str) -> bool:
    """Return whether a path is a folder or inside it, with links resolved."""
    return path.resolve().is_relative_to(os.path.realpath(os.path.expanduser(folder)))


def _parse_kind(name: str) -> Kind:
    if name in SIMPLE_KINDS:
        return Kind(*SIMPLE_KINDS[name])
    if name.startswith("list of "):
        item = _parse_kind(name.removeprefix("list of "))
        return Kind(f"a list, each item {item.expects}", lambda value: _is_list(value, item))
    if name.startswith("one of "):
        words = [BOOLEANS.get(word, word) for word in name.removeprefix("one of ").split(", ")]
        expects = " or ".join(str(word).lower() if isinstance(word, bool) else word for word in words)
        return Kind(
            expects, lambda value: any(value is word or isinstance(value, str) and value == word for word in words)
        )
    if match := RANGE_PATTERN.fullmatch(name):
        return _build_number_kind(name, match)
    raise ValueError(f"config/schemas/operators.yaml: there is no kind {name!r}")


def _build_number_kind(name: str, match: re.Match) -> Kind:
    whole = match["type"] == "integer"
    lowest, highest = (-MAX_INTEGER, MAX_INTEGER) if whole else (-MAX_NUMBER, MAX_NUMBER)
    low, high = (float(match[side]) if match[side] else None for side in ("low", "high"))
    limits = {"from": match["low"], "to" if match["low"] else "up to": match["high"]}
    bounds = " ".join(f"{word} {limit}" for word, limit in limits.items() if limit)
    low, high = lowest if low is None else low, highest if high is None else high
    expects = f"a {'whole ' if whole else ''}number {bounds}".rstrip()
    return Kind(expects, lambda value: _is_number(value, whole) and low <= value <= high)


def _find_number_type(name: str) -> str | None:
    match = RANGE_PATTERN.fullmatch(name)
    return {"fraction": "number", "share": "number", "count": "integer"}.get(name) or (match and match["type"])


def _is_number(value: object, whole: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(_limit_integer(value)):
        return False
    return not whole or isinstance(value, int) or value.is_integer()


def _limit_integer(value: float) -> float:
    """Return the value, or infinity for an int that no float can represent."""
    return value if isinstance(value, float) or abs(value) <= MAX_INTEGER else math.inf


def _is_list(value: object, item: Kind) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_LIST_LENGTH and all(map(item.accepts, value))


def _is_text(value: object) -> bool:
    if (
        not isinstance(value, str)
        or len(value) > MAX_TEXT_LENGTH
        or LAMBDA_PATTERN.search(value)
        or CONTROL_TOKEN_PATTERN.search(value)
    ):
        return False
    return all(map(_is_plain, value))


def _is_plain(character: str) -> bool:
    """Return whether a character is plain text; paths, markup and code need other ASCII characters."""
    if character.isascii():
        return character.isalnum() or character == " " or character in PUNCTUATION
    return unicodedata.category(character)[0] in "LMNPS"


def _is_prompt(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_PROMPT_LENGTH or CONTROL_TOKEN_PATTERN.search(value):
        return False
    return all(character == "\n" or not unicodedata.category(character).startswith("C") for character in value)


def _is_literal(value: object) -> bool:
    return _is_text(value) and value.strip() != "" and not PATTERN_CHARACTERS & set(value)


def _is_rewrite(value: object) -> bool:
    """Return whether a value is a rule `question = answer => question = answer` of plain text and names in braces."""
    if not isinstance(value, str) or len(value) > 2 * MAX_TEXT_LENGTH or " => " not in value:
        return False
    if not all(map(_is_text, RULE_SIGN.split(NAME_IN_BRACES.sub("x", value)))):
        return False
    try:
        Rewrite(value)
    except ValueError:
        return False
    return True


def _is_characters(value: object) -> bool:
    if not isinstance(value, str) or not value or len(value) > MAX_CHARACTERS or LAMBDA_PATTERN.search(value):
        return False
    return value.isprintable() and not re.search(r"/\w|\.\.|\\|[{}]", value)


def _is_path(value: object) -> bool:
    """Return whether a value can be a folder's name; `find_folder_problem` checks the folder."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable() and not re.search(r"[{}]", value)


def shorten_value(value: object) -> str:
    """Return a value's `repr`, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers with thousands of digits
        return "a number that is too long"
    return text if len(text) <= 80 else f"{text[:77]}..."


BOOLEANS = {"true": True, "false": False}
PLAIN_TEXT = (
    f"plain text of up to {MAX_TEXT_LENGTH} letters, digits, blanks and {PUNCTUATION}, without control tokens or code"
)
SIMPLE_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "fraction": ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "share": ("a number above 0 and up to 1", lambda value: _is_number(value) and 0 < value <= 1),
    "count": ("a whole number from 0", lambda value: _is_number(value, whole=True) and 0 <= value <= MAX_INTEGER),
    "text": (PLAIN_TEXT, _is_text),
    "prompt": (
        f"up to {MAX_PROMPT_LENGTH} printable characters and line breaks, without control tokens",
        _is_prompt,
    ),
    "rewrite": (
        f"'question = answer => question = answer' of plain text, with up to {MAX_SLOTS} names in braces on the left "
        "side, and no others on the right side",
        _is_rewrite,
    ),
    "literal": (f"{PLAIN_TEXT}, and without {' '.join(sorted(PATTERN_CHARACTERS))}", _is_literal),
    "characters": (f"up to {MAX_CHARACTERS} printable characters, and no path", _is_characters),
    "size": (
        "a string with a whole number of bytes, KiB, MiB, GiB or TiB",
        lambda value: isinstance(value, str) and bool(SIZE_PATTERN.fullmatch(value)),
    ),
    "statistic": (
        "the name of a statistic, such as image_text_similarity",
        lambda value: isinstance(value, str) and bool(STATISTIC_PATTERN.fullmatch(value)),
    ),
    "statistic field": (
        "a statistic's column, such as __dj__stats__.image_text_similarity",
        lambda value: isinstance(value, str) and bool(STATISTIC_FIELD.fullmatch(value)),
    ),
    "chat template": (
        "the name of a file in config/chat_templates",
        lambda value: isinstance(value, str) and value in list_config_names("chat_templates"),
    ),
    "model": ("the folder of a model", _is_path),
    "folder": ("a folder", _is_path),
    # an operator, which is checked like those of the recipe
    "captioner": (
        "an operator that writes captions, {name: {argument: value}}",
        lambda value: isinstance(value, dict),
    ),
}


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
