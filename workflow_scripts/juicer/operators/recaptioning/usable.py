"""Why a caption cannot be used."""

from data_juicer.utils.mm_utils import get_special_tokens

from formats.prompts import CONTROL


def problem_of(caption: str, max_length: int) -> str | None:
    """None for a caption that can be used; otherwise `empty`, `too long` or `control token`.

    A line break counts as a control token: it ends a caption in the stage-1 template.
    """
    if not caption:
        return "empty"
    if len(caption) > max_length:
        return "too long"
    special = any(token in caption for token in get_special_tokens().values())
    if special or CONTROL.search(caption) or len(caption.splitlines()) > 1:
        return "control token"
    return None
