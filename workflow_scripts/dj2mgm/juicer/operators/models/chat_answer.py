"""What a server's chat completion says, and what is wrong with one that says nothing."""

import re
from dataclasses import dataclass

REFUSED, CUT_OFF, CONTROL_CHARACTER, QUOTES_KEY = "refused", "cut off", "control character", "quotes the key"
THOUGHTS = re.compile(r"\A.*</think>", re.DOTALL)  # some chat templates have opened them in the question
# lone surrogates, which no file can hold; C0 and C1; and what turns the direction of the text around it
UNUSABLE = re.compile(r"[\ud800-\udfff\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """A text that the server has written, perhaps an empty one.

    Args:
        problem: `refused` (by the server's filter of contents, or the model), `cut off` at `max_tokens`, or within the
            model's thoughts, `control character` (replaced in the text), `quotes the key` (masked), or None.
        tokens: of image, question and answer, as the server counts them; None where it does not tell.
    """

    text: str
    problem: str | None
    tokens: int | None


def answer_of(values: object) -> Answer | None:
    """The first choice of a chat completion, its text on one line and without thoughts; None for JSON that is none."""
    match values:
        case {"choices": [{"message": {**message}, **choice}, *_]}:
            text = _text_of(message.get("content"))
        case _:
            return None
    if text is None:
        return None
    reason = choice.get("finish_reason")
    text = " ".join(THOUGHTS.sub("", text).split())
    problem = None
    if reason == "content_filter" or message.get("refusal"):
        problem = REFUSED
    elif reason == "length" or text.startswith("<think>"):
        problem = CUT_OFF
    elif UNUSABLE.search(text):
        problem = CONTROL_CHARACTER
    return Answer(UNUSABLE.sub("\N{REPLACEMENT CHARACTER}", text), problem, tokens_of(values))


def tokens_of(values: object) -> int | None:
    """What an answer has cost, also one that is no chat completion; None where it does not tell."""
    usage = values.get("usage") if isinstance(values, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and tokens >= 0 else None


def _text_of(content: object) -> str | None:
    """A message's text, which may come in parts, beside others such as thoughts; None where there can be none."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content or "" if isinstance(content, str | None) else None
