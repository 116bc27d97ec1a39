"""Answers of a chat server: their text, problems and tokens, read from a chat completion."""

import re
from dataclasses import dataclass

from dj2mgm.settings.endpoints import MAX_TOKENS

REFUSED, CUT_OFF, CONTROL_CHARACTER, QUOTES_KEY = "refused", "cut off", "control character", "quotes the key"
TOO_LONG = "too long"
MAX_TEXT_LENGTH = 2**17  # characters of a usable answer
THOUGHTS_PATTERN = re.compile(r"\A.*</think>", re.DOTALL)  # some chat templates put the opening tag into the question
# lone surrogates (which UTF-8 cannot encode), C0 and C1, and characters that change the direction of the text
UNUSABLE = re.compile(r"[\ud800-\udfff\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class ChatAnswer:
    """A text from the server, possibly empty."""

    text: str  # on one line
    # `refused` (by the server's content filter or the model), `cut off` (at `max_tokens`, or within the model's
    # thoughts), `too long` (cut), `control character` (replaced in the text), `quotes the key` (masked), or None
    problem: str | None
    tokens: int | None  # tokens of image, question and answer as counted by the server; None if it does not report them


def read_answer(values: object) -> ChatAnswer | None:
    """Return the first choice of a chat completion, on one line and without thoughts; None if it is not one."""
    match values:
        case {"choices": [{"message": {**message}, **choice}, *_]}:
            text = _read_text(message.get("content"))
        case _:
            return None
    if text is None:
        return None
    reason = choice.get("finish_reason")
    text = " ".join(THOUGHTS_PATTERN.sub("", text).split())
    problem = None
    if reason == "content_filter" or message.get("refusal"):
        problem = REFUSED
    elif reason == "length" or text.startswith("<think>"):
        problem = CUT_OFF
    elif len(text) > MAX_TEXT_LENGTH:
        problem = TOO_LONG
    elif UNUSABLE.search(text):
        problem = CONTROL_CHARACTER
    return ChatAnswer(UNUSABLE.sub("\N{REPLACEMENT CHARACTER}", text), problem, read_token_count(values))


def read_token_count(values: object) -> int | None:
    """Return the tokens that the server has counted, even for an invalid completion; None if it reports none."""
    usage = values.get("usage") if isinstance(values, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens <= MAX_TOKENS else None


def _read_text(content: object) -> str | None:
    """Return a message's text, joined from its text parts; None if the content is invalid."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content or "" if isinstance(content, str | None) else None
