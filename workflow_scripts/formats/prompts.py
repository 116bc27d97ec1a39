"""Conversation templates: what the language model reads before it answers.

Templates are lists of (text, is_answer) segments; the loss is taken on answers only. `<image>` marks where the image's
tokens go. Both follow the public MGM code: `plain` for stage 1, `gemma` for instructions.
"""

import re

from errors import InputError
from formats.llava import IMAGE_TOKEN

# what tokenizers and templates take for control, so that no data may contain it
CONTROL = re.compile(r"<\|[^|<>]*\|>|</?(?:s|bos|eos|pad|unk|mask|image|start_of_turn|end_of_turn|unused\d+)>")

Segments = list[tuple[str, bool]]


def check_no_control(text: str, where: str) -> None:
    """Refuse a question that would be taken for an image or the end of a turn."""
    if control := CONTROL.search(text):
        raise InputError(f"{where}: its text holds the control token {control.group()}; mend or delete the row")


def plain(turns: list[dict], eos: str) -> Segments:
    """Stage 1: the image, its caption, a line break; whatever was asked is left out."""
    image = IMAGE_TOKEN if IMAGE_TOKEN in turns[0]["value"] else ""
    return [(image, False), (turns[-1]["value"] + "\n", True)]


def gemma(turns: list[dict], eos: str) -> Segments:
    """Gemma's chat format, ending each answer with <end_of_turn> and the end-of-sequence token."""
    segments: Segments = []
    for turn in turns:
        if turn["from"] == "human":
            text = f"<start_of_turn>user\n{_image_first(turn['value'])}<end_of_turn>\n<start_of_turn>model\n"
            segments.append((text, False))
        else:
            segments.append((f"{turn['value']}<end_of_turn>\n{eos}", True))
    return segments


def _image_first(text: str) -> str:
    """MGM puts the image at the beginning of its turn, wherever the data has it."""
    if IMAGE_TOKEN not in text:
        return text
    return f"{IMAGE_TOKEN}\n{text.replace(IMAGE_TOKEN, '').strip()}".strip()


TEMPLATES = {"plain": plain, "gemma": gemma}


def segments_of(template: str, turns: list[dict], eos: str = "") -> Segments:
    """Segments of a conversation under a template named in a model file."""
    if template not in TEMPLATES:
        raise InputError(f"template: unknown conversation template {template!r}; known are {sorted(TEMPLATES)}")
    return TEMPLATES[template](turns, eos)


def prompt_of(template: str, question: str) -> str:
    """The text up to where the answer begins, for generation about one image."""
    human = {"from": "human", "value": f"{IMAGE_TOKEN}\n{question}" if question else IMAGE_TOKEN}
    segments = segments_of(template, [human, {"from": "gpt", "value": ""}])
    return "".join(text for text, is_answer in segments if not is_answer)


def stop_tokens(template: str) -> list[str]:
    """Tokens that end an answer, beside the tokenizer's own end of sequence."""
    return {"plain": ["\n"], "gemma": ["<end_of_turn>"]}[template]
