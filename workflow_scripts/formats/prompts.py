"""Conversation templates: what the language model reads before it answers.

Templates are lists of (text, is_answer) segments; the loss is taken on answers only. `<image>` marks where the image's
tokens go. `plain` and `gemma` follow the published MGM code: on a Vicuna stage 1 is plain, on a Gemma both stages are
in Gemma's chat format. `chatml` is the chat format of Qwen2.5.
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
        raise InputError(f"{where}: its text holds the control token {control.group()}; fix or delete the row")


def image_problem(row: dict) -> str | None:
    """Why the model would not be shown a LLaVA row's image exactly once, in a question; None if it would."""
    wanted = int("image" in row)
    tokens = sum(turn["value"].count(IMAGE_TOKEN) for turn in row["conversations"][::2])
    if tokens == wanted:
        return None
    return f"expected {wanted} image token {IMAGE_TOKEN} in what the human says, found {tokens}"


def control_problem(row: dict) -> str | None:
    """Which control token a LLaVA row holds beside its image token; None if there is none."""
    questions, answers = (turn["value"] for turn in row["conversations"][::2]), row["conversations"][1::2]
    texts = [*(text.replace(IMAGE_TOKEN, "") for text in questions), *(turn["value"] for turn in answers)]
    found = next(filter(None, map(CONTROL.search, texts)), None)
    return found and f"its text holds the control token {found.group()}"


def plain(turns: list[dict], eos: str) -> Segments:
    """The image, its caption, a line break; whatever was asked is left out."""
    image = IMAGE_TOKEN if IMAGE_TOKEN in turns[0]["value"] else ""
    return [(image, False), (turns[-1]["value"] + "\n", True)]


def gemma(turns: list[dict], eos: str) -> Segments:
    """Gemma's chat format, ending each answer with <end_of_turn> and the end-of-sequence token."""
    return _chat(turns, "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", f"<end_of_turn>\n{eos}")


def chatml(turns: list[dict], eos: str) -> Segments:
    """Qwen's chat format without a system turn; <|im_end|>, its end-of-sequence token, ends each turn."""
    return _chat(turns, "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")


def _chat(turns: list[dict], before_question: str, after_question: str, after_answer: str) -> Segments:
    segments: Segments = []
    for turn in turns:
        if turn["from"] == "human":
            segments.append((f"{before_question}{_image_first(turn['value'])}{after_question}", False))
        else:
            segments.append((f"{turn['value']}{after_answer}", True))
    return segments


def _image_first(text: str) -> str:
    """MGM puts the image at the beginning of its turn, wherever the data has it."""
    if IMAGE_TOKEN not in text:
        return text
    return f"{IMAGE_TOKEN}\n{text.replace(IMAGE_TOKEN, '').strip()}".strip()


TEMPLATES = {"plain": plain, "gemma": gemma, "chatml": chatml}


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
    return {"plain": ["\n"], "gemma": ["<end_of_turn>"], "chatml": ["<|im_end|>"]}[template]
