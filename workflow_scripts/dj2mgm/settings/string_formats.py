"""Formats of strings: names, paths and addresses of servers in the configuration, and texts to train on.

Messages do not repeat wrong addresses and variables, which may be passwords or keys. Texts to train on contain no
control token of a tokenizer or chat template, and no control character.
"""

import base64
import html
import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from dj2mgm.errors import InputError
from dj2mgm.storage.files import can_be_path

ADDRESS_RULE = (
    "be an address such as http://localhost:8000/v1, without a user, password, query or blank; put the key into the "
    "environment variable that key_variable names"
)
MIN_SECRET_LENGTH = 8  # characters; a shorter key may be a placeholder such as EMPTY, which captions may contain
MAX_TOKENS = 10**9  # tokens of an answer; a larger number cannot be a count
VARIABLE_RULE = (
    "be the name of an environment variable, such as OPENAI_API_KEY, that holds the key; never the key itself"
)
CONTROL_TOKEN_PATTERN = re.compile(
    r"<\|[^|<>]*\|>|</?(?:s|bos|eos|pad|unk|mask|image|start_of_turn|end_of_turn|unused\d+)>"
)
CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all except tabs and line ends


def is_address(text: str) -> bool:
    """Return whether a string is the address of a server over HTTP."""
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a valid number
        return False
    return bool(is_http) and not re.search(r"[@?#\\\s{}]", text) and text.isprintable()


def normalize_address(text: str) -> str:
    """Return the canonical spelling of an address: scheme and host in lower case, no / at the end."""
    parts = urlsplit(text)
    return parts._replace(netloc=parts.netloc.lower()).geturl().rstrip("/")


def is_variable(text: str) -> bool:
    """Return whether a string is a name in capitals. API keys are rejected: they have lower-case letters or -."""
    return bool(re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", text))


def compile_secret_pattern(secret: str) -> re.Pattern:
    """Return a pattern that finds a secret in a server's answer, so that an echoed API key reaches no file or log.

    It finds the secret unchanged, and with the escapes of JSON, addresses and HTML. If the secret is not short, it also
    finds it in any letter case, in hexadecimal digits and in base64. A malicious server can use other encodings.
    """
    plain = "".join(map(_build_character_pattern, secret))
    if len(secret) < MIN_SECRET_LENGTH:
        return re.compile(plain)
    content = secret.encode()
    return re.compile(
        "|".join([plain, content.hex(), *(_build_base64_pattern(content, before) for before in range(3))]), re.I
    )


def _build_character_pattern(character: str) -> str:
    code = f"{ord(character):02x}"
    escapes = rf"(?i:\\{{1,4}}u00{code}|%(25)?{code}|&#x0{{0,4}}{code};|&#0{{0,4}}{ord(character)};)"
    return rf"(?:{escapes}|\\{{0,4}}{re.escape(character)}|{re.escape(html.escape(character))})"


def _build_base64_pattern(content: bytes, before: int) -> str:
    """Return a pattern of the base64 characters that `content` determines, if it starts at byte `before` (mod 3)."""
    encoded = base64.b64encode(bytes(before) + content).decode()
    characters = encoded[-(-before * 8 // 6) : (before + len(content)) * 8 // 6]
    return "".join({"+": "[+-]", "/": "[/_]"}.get(character, character) for character in characters)


@dataclass(frozen=True)
class Format:
    """A format of strings.

    Args:
        matches: function that returns a true value for a valid string.
        rule: the end of a sentence that begins with "must".
        secret: whether a wrong value may be a password or key, which messages do not repeat.
    """

    matches: Callable[[str], object]
    rule: str
    secret: bool = False


MAX_SHOWN_PATHS = 3


def _is_periodic(text: str) -> bool:
    """Return whether Snakemake takes a value for the result of an endless recursion: 20 equal parts at its end."""
    return re.search(r"(.+)\1{19}$", text) is not None


FORMATS = {
    # Folders, targets and shell words have such names. Umlauts are left out: file systems spell them in two ways.
    "name": Format(
        lambda text: re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_])?", text) and not _is_periodic(text),
        "be a name of up to 100 ASCII letters, digits and _, with - and . inside it, that does not end with 20 equal "
        "parts; rename it",
    ),
    # A dataset has the name of its folder, which the user chose. On a cluster, Snakemake passes names to its jobs in
    # quotes, several of them separated by commas.
    "folder": Format(
        lambda text: (
            text.isprintable() and re.fullmatch(r"(?!\s*$|\.\.?$)[^{}'\"\\,/]+", text) and not _is_periodic(text)
        ),
        "have no braces, quotes, commas, backslashes, tabs, line breaks and other control characters in its name, and "
        "must not end with 20 equal parts; rename it, or describe the data in a config/datasets/<name>.yaml",
    ),
    "path": Format(
        # Python reads a byte that is not UTF-8 as half a surrogate pair, which no file in results/ can hold.
        lambda text: re.fullmatch(r"[^{}\x00-\x1f\x7f\ud800-\udfff]+", text) and can_be_path(text),
        "be a path without braces, tabs, line breaks and other control characters, in UTF-8, of names of up to 255 "
        "bytes; rename the file or folder",
    ),
    "repository": Format(
        re.compile(r"(?!.*(--|\.\.))[\w](?:[\w.-]{0,94}\w)?/[\w](?:[\w.-]{0,94}\w)?", re.ASCII).fullmatch,
        "be a repository of the hub, <owner>/<name>, of ASCII letters, digits, _, - and .",
    ),
    "question": Format(
        lambda text: not CONTROL_TOKEN_PATTERN.search(text), "hold no control token: the template has its own"
    ),
    "question_prompt": Format(
        lambda text: re.fullmatch(r"[^{}]*\{question\}[^{}]*", text) and not CONTROL_TOKEN_PATTERN.search(text),
        "hold {question} once, and no other braces or control token",
    ),
    "address": Format(is_address, ADDRESS_RULE, secret=True),
    "variable": Format(is_variable, VARIABLE_RULE, secret=True),
}


def has_format(kind: str, text: str) -> bool:
    """Return whether a string has one of the `FORMATS`."""
    return bool(FORMATS[kind].matches(text))


def check_format(what: str, kind: str, text: str) -> None:
    """Raise InputError unless a string has a format.

    Args:
        what: description of the string, with which the message begins.
        kind: a key of `FORMATS`.
        text: the string.
    """
    if not has_format(kind, text):
        raise InputError(f"{what} must {FORMATS[kind].rule}")


def check_paths(paths: Sequence[str]) -> None:
    """Raise InputError unless all paths have the format; it names the first paths and states their number."""
    bad = [path for path in paths if not has_format("path", path)]
    if bad:
        more = f", … ({len(bad)} in all), each" if len(bad) > 1 else ""
        check_format(", ".join(bad[:MAX_SHOWN_PATHS]) + more, "path", bad[0])


def make_name(text: str) -> str:
    """Return a valid name for a user's `text`, such as `my_photos` for `my photos`; letters lose their accents."""
    text = "".join(
        character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)
    )
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:100].strip("-._") or "my_data"


def _build_string_type(kind: str) -> type[str]:
    def check(text: str) -> str:
        if not has_format(kind, text):
            raise PydanticCustomError("format", "{kind}", {"kind": kind})
        return text

    return Annotated[str, AfterValidator(check), WithJsonSchema({"type": "string", "format": kind})]


Name = _build_string_type("name")
Folder = _build_string_type("folder")
FilePath = _build_string_type("path")  # a path or a hub id; ~ is expanded when a file of the configuration is read
Repository = _build_string_type("repository")
Question = _build_string_type("question")
QuestionPrompt = _build_string_type("question_prompt")
Address = _build_string_type("address")
Variable = _build_string_type("variable")


def find_control_character(text: str) -> str | None:
    r"""Return the escape of a control character in a text, such as `\x00` in UTF-16 that is read as UTF-8, or None."""
    match = CONTROL_CHARACTER_PATTERN.search(text)
    return match and f"\\x{ord(match.group()):02x}"


def find_control_token(text: str, tokens: Collection[str] = ()) -> str | None:
    """Return a control token in a text, or None: one of any template, else one of `tokens`, the template in use."""
    if match := CONTROL_TOKEN_PATTERN.search(text):
        return match.group()
    return next((token for token in tokens if token in text), None)
