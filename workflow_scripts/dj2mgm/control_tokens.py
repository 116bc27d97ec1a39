"""Control tokens of tokenizers and chat templates, and control characters, which no text to train on may contain."""

import re
from collections.abc import Collection

CONTROL_TOKEN_PATTERN = re.compile(
    r"<\|[^|<>]*\|>|</?(?:s|bos|eos|pad|unk|mask|image|start_of_turn|end_of_turn|unused\d+)>"
)
CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all except tabs and line ends


def find_control_character(text: str) -> str | None:
    r"""Return the escape of a control character in a text, such as `\x00` in UTF-16 that is read as UTF-8, or None."""
    match = CONTROL_CHARACTER_PATTERN.search(text)
    return match and f"\\x{ord(match.group()):02x}"


def find_control_token(text: str, tokens: Collection[str] = ()) -> str | None:
    """Return a control token in a text, or None: one of any template, else one of `tokens`, the template in use."""
    if match := CONTROL_TOKEN_PATTERN.search(text):
        return match.group()
    return next((token for token in tokens if token in text), None)
