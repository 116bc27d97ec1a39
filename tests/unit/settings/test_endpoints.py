"""API keys in a server's answers are found in every encoding."""

import base64
import html
import json
from urllib.parse import quote

import pytest

from dj2mgm.settings.string_formats import compile_secret_pattern

KEY = 'sk-Ab12/+xyz~?>"key'
SPELLINGS = {
    "as it is": KEY,
    "capitals": KEY.upper(),
    "small letters": KEY.lower(),
    "json": json.dumps(KEY),
    "html": html.escape(KEY),
    "percent": quote(KEY, safe=""),
    "hexadecimal": KEY.encode().hex(),
    "base64 for addresses": base64.urlsafe_b64encode(KEY.encode()).decode(),
    **{f"base64 after {n}": base64.b64encode(b"u" * n + KEY.encode() + b":tail").decode() for n in range(4)},
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_key_is_found_in_every_spelling(spelling):
    redacted = compile_secret_pattern(KEY).sub("<key>", f"before {spelling} after")
    assert "<key>" in redacted and redacted.startswith("before ") and redacted.endswith(" after")
    assert len(redacted) <= len("before <key> after") + 12  # characters that base64 combines with their neighbors


def test_a_placeholder_is_not_found_in_other_words():
    assert compile_secret_pattern("EMPTY").sub("<key>", "EMPTY, an empty RU1QVFk=") == "<key>, an empty RU1QVFk="
