"""What tokenizers and chat templates take for control, so that neither data nor settings may contain it."""

import re
from collections.abc import Collection

CONTROL = re.compile(r"<\|[^|<>]*\|>|</?(?:s|bos|eos|pad|unk|mask|image|start_of_turn|end_of_turn|unused\d+)>")


def find_control(text: str, tokens: Collection[str] = ()) -> str | None:
    """The first control token in a text; None if there is none.

    Args:
        tokens: of the chat format in use, beside what every text is searched for.
    """
    if match := CONTROL.search(text):
        return match.group()
    return next((token for token in tokens if token in text), None)
