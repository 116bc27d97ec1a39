"""How a configuration names a server of models: by its address and by the variable that holds its key, never by a key.

Messages do not repeat what was found instead: it may be a password or a key.
"""

import re
from urllib.parse import urlsplit

ADDRESS = (
    "be an address such as http://localhost:8000/v1, without a user, password, query or blank; a key has key_variable"
)
VARIABLE = "be the name of an environment variable, such as OPENAI_API_KEY, that holds the key; never the key itself"


def is_address(text: str) -> bool:
    """Of a server, over HTTP."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        return False
    return bool(known) and not re.search(r"[@?#\\\s{}]", text) and text.isprintable()


def one_address(text: str) -> str:
    """The one spelling of an address: scheme and host in small letters, no / at the end."""
    parts = urlsplit(text)
    return parts._replace(netloc=parts.netloc.lower()).geturl().rstrip("/")


def is_variable(text: str) -> bool:
    """A name in capitals, as variables of an environment are written; keys have small letters, or -."""
    return bool(re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", text))
