"""Servers of models in a configuration: an address, and the environment variable that holds the key.

Messages do not repeat wrong values, which may be passwords or keys.
"""

import base64
import html
import re
from urllib.parse import urlsplit

ADDRESS_RULE = (
    "be an address such as http://localhost:8000/v1, without a user, password, query or blank; put the key into the "
    "environment variable that key_variable names"
)
MIN_SECRET_LENGTH = 8  # characters; a shorter key may be a placeholder such as EMPTY, which captions may contain
MAX_TOKENS = 10**9  # tokens of an answer; a larger number cannot be a count
VARIABLE_RULE = (
    "be the name of an environment variable, such as OPENAI_API_KEY, that holds the key; never the key itself"
)


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
