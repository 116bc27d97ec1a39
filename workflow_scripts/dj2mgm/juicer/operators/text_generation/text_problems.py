"""Problems of texts that a model has written, which are untrusted: captions, questions and answers."""

import re

from data_juicer.utils.mm_utils import get_special_tokens

from dj2mgm.control_tokens import find_control_token

CONTROL_TOKEN = "control token"
# turns that chat templates write as plain text, and tokens of the templates of unsupported models
TURN_MARKER = re.compile(r"\b(?:USER|ASSISTANT|HUMAN|SYSTEM) ?:|\[/?(?:INST|IMG)\b|<\uff5c[^>]*>|<<SYS>>")
# tags, entities, Markdown, links
MARKUP = re.compile(r"</?[A-Za-z!?][^>]*>|&[A-Za-z#]\w*;|```|\*\*|!\[|\]\(|https?://|\{\{|\\[A-Za-z]+\{")
# characters that are invisible, move a terminal's cursor, end a line or change the direction of text
UNUSABLE = re.compile(
    r"[\ud800-\udfff\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
    r"|(?<![^\x00-\x7f])[\u200c-\u200f](?![^\x00-\x7f])"  # joiners and marks of other scripts, and of emojis
)


def find_text_problem(text: str, max_length: int) -> str | None:
    """Return why a text cannot be used (`empty`, `too long`, `control token`, …), or None."""
    if not text:
        return "empty"
    if len(text) > max_length:
        return "too long"
    if find_control_token(text, get_special_tokens().values()) or TURN_MARKER.search(text):
        return CONTROL_TOKEN
    if UNUSABLE.search(text):
        return "control character"
    return "markup" if MARKUP.search(text) else None
