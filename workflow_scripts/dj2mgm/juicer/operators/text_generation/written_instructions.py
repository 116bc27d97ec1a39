"""Questions and answers that a model writes about an image: prompt and schema of untrusted answers."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from .captioner import cut_object

QUESTION_KINDS = {
    "recognition": "what something is, or its color, shape or material",
    "count": "how many things of one kind there are",
    "position": "where something is",
    "text": "the text that can be read in the image, only if there is any",
    "reasoning": "a conclusion from several things in the image",
    "yes_no": "answered by yes or no, where yes and no are equally frequent",
}
MAX_ITEMS = 100  # instructions in an answer
WRONG_SCHEMA, NO_QUESTION = "wrong schema", "no question"
PROMPT = """Write {count} different questions about this image and their answers, in {language}.
Each question has exactly one right answer, which can be seen in the image and cannot be guessed without it.
An answer has as few words as possible. Use these kinds of questions:
{kinds}
Reply with JSON only, in this form: {{"instructions": [{{"kind": "{example}", "question": "…", "answer": "…"}}]}}"""


class Instruction(BaseModel):
    """A question about an image with its answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, str_strip_whitespace=True)

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Rejection:
    """The reason why a row gets no instruction."""

    reason: str


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    instructions: Annotated[list[object], Field(max_length=MAX_ITEMS)]


INSTRUCTION_ADAPTER = TypeAdapter(Instruction)


def build_prompt(count: int, kinds: list[str], language: str) -> str:
    """Return the message for a model."""
    kind_lines = "\n".join(f"- {kind}: {QUESTION_KINDS[kind]}" for kind in kinds)
    return PROMPT.format(count=count, language=language, kinds=kind_lines, example=kinds[0])


def parse_instructions(answer: str, kinds: Collection[str]) -> list[Instruction | None] | None:
    """Return the instructions in a model's answer, with None for each item of another schema; None for no list."""
    try:
        items = _Answer.model_validate_json(cut_object(answer)).instructions
    except ValidationError:
        return None
    return [_parse_item(item, kinds) for item in items]


def _parse_item(item: object, kinds: Collection[str]) -> Instruction | None:
    try:
        instruction = INSTRUCTION_ADAPTER.validate_python(item)
    except ValidationError:
        return None
    return instruction if instruction.kind in kinds else None
