"""What a server's chat completion says, and what is wrong with one that says nothing."""

from dataclasses import dataclass

REFUSED, CUT_OFF = "refused", "cut off"


@dataclass(frozen=True)
class Answer:
    """A text that the server has written, perhaps an empty one.

    Args:
        problem: `refused` (by the server's filter of contents, or the model), `cut off` at `max_tokens`, or None.
        tokens: of image, question and answer, as the server counts them; None where it does not tell.
    """

    text: str
    problem: str | None
    tokens: int | None


def answer_of(values: object) -> Answer | None:
    """The first choice of a chat completion, its text on one line; None for JSON that is none."""
    match values:
        case {"choices": [{"message": {**message}, **choice}, *_], **others}:
            text = message.get("content") or ""
        case _:
            return None
    if not isinstance(text, str):
        return None
    reason = choice.get("finish_reason")
    refused = reason == "content_filter" or bool(message.get("refusal"))
    problem = REFUSED if refused else CUT_OFF if reason == "length" else None
    usage = others.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return Answer(" ".join(text.split()), problem, tokens if type(tokens) is int else None)
