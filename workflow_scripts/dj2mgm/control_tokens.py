"""Control tokens of tokenizers and chat templates, which neither data nor settings may contain."""

import re
from collections.abc import Collection

CONTROL_TOKEN_PATTERN = re.compile(
    r"<\|[^|<>]*\|>|</?(?:s|bos|eos|pad|unk|mask|image|start_of_turn|end_of_turn|unused\d+)>"
)


def find_control_token(text: str, tokens: Collection[str] = ()) -> str | None:
    """Return a control token in a text, or None: one of any template, else one of `tokens`, the template in use."""
    if match := CONTROL_TOKEN_PATTERN.search(text):
        return match.group()
    return next((token for token in tokens if token in text), None)
