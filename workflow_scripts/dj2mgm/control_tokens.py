"""Control tokens of tokenizers and chat templates, which neither data nor settings may contain."""

import re
from collections.abc import Collection

CONTROL_TOKEN_PATTERN = re.compile(
    r"<\|[^|<>]*\|>|</?(?:s|bos|eos|pad|unk|mask|image|start_of_turn|end_of_turn|unused\d+)>"
)


def find_control_token(text: str, tokens: Collection[str] = ()) -> str | None:
    """Return the first control token in a text, of all templates or of the template in use (`tokens`), or None."""
    if match := CONTROL_TOKEN_PATTERN.search(text):
        return match.group()
    return next((token for token in tokens if token in text), None)
