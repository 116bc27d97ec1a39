"""What the language model reads before it answers: conversations in the model's chat format.

A chat format is a Jinja chat template, rendered as transformers does it, in a process with limits, since a template may
come with a model's folder. config/chat_templates holds the formats of the published MGM (`plain`, `gemma`) and Qwen's
(`chatml`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from dj2mgm.config.chat_templates import OF_THE_TOKENIZER, read_chat_template
from dj2mgm.control_tokens import find_control
from dj2mgm.data.chat_rendering import render
from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.errors import InputError

Segments = list[tuple[str, bool]]  # text, and whether it is an answer: the loss is taken on answers only

ROLES = {"human": "user", "gpt": "assistant"}  # LLaVA's words, and those of chat templates
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
MARK = "\ue000"  # of Unicode's private use: where an answer ends
REMEDY = "write the format as a file in config/chat_templates and name that (docs/models.md)"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat format for one tokenizer.

    Attributes:
        source: Jinja. Where it does not mark answers with `{% generation %}`, an answer is what a turn of the model
            adds to the prompt for it.
        stop_tokens: tokens that end an answer, beside the tokenizer's end-of-sequence token.
        apart: those of them that are plain text to the tokenizer, such as a line break. They are tokenized apart from
            the answer, since a tokenizer might join both (Qwen's has a token for a full stop with a line break).
        control_tokens: tokens that no question and no answer may contain.
        special_tokens: texts that the template may use, such as `eos_token`.
    """

    name: str
    source: str
    stop_tokens: tuple[str, ...]
    control_tokens: tuple[str, ...]
    special_tokens: dict[str, str]
    apart: tuple[str, ...] = ()

    @classmethod
    def of(cls, template: str | dict, tokenizer: PreTrainedTokenizerBase) -> Self:
        """
        Args:
            template: a name that config/chat_templates.py knows, or the content that it reads.

        Raises:
            InputError: the name is unknown, the tokenizer has no chat template of its own, or nothing ends an answer.
        """
        content = read_chat_template(template) if isinstance(template, str) else template
        special_tokens = {"bos_token": "", "eos_token": ""} | dict(tokenizer.special_tokens_map)
        if content["name"] == OF_THE_TOKENIZER:
            return cls._of_tokenizer(tokenizer, special_tokens)
        tokens = tuple(content["stop_tokens"]), tuple(content["control_tokens"])
        apart = tuple(token for token in content["stop_tokens"] if token not in tokenizer.get_added_vocab())
        template = cls(content["name"], content["chat_template"], *tokens, special_tokens, apart)
        template._check_ends()
        return template

    @classmethod
    def _of_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, special_tokens: dict[str, str]) -> Self:
        """The tokenizer's own; an answer ends with the first special token behind it."""
        source, control_tokens = tokenizer.chat_template, tuple(tokenizer.all_special_tokens)
        if not isinstance(source, str):
            raise InputError(f"template {OF_THE_TOKENIZER}: the model's tokenizer has no chat template; {REMEDY}")
        template = cls(OF_THE_TOKENIZER, source, (), control_tokens, special_tokens)
        text = "".join(text for text, _ in template.segments(_turns("question", "answer")))
        behind = tokenizer.tokenize(text.rpartition("answer")[2])
        stops = tuple(token for token in behind if token in control_tokens)[:1]
        template = cls(OF_THE_TOKENIZER, source, stops, control_tokens, special_tokens)
        template._check_ends()
        return template

    def _check_ends(self) -> None:
        """Raise InputError unless something ends every answer: else a model would not learn where to stop."""
        ends = [end for end in (self.special_tokens["eos_token"], *self.stop_tokens) if end]
        turns = _turns("question", "answer")
        several = [*turns, {"from": "human", "value": "question"}, turns[1]]
        for conversation in (turns, several):
            try:
                segments = self.segments(conversation)
            except InputError:
                if conversation is turns:
                    raise
                break  # the format takes one question only, and rows with more are refused
            said = "".join(text if is_answer else MARK for text, is_answer in segments)
            for answer in filter(None, said.split(MARK)):
                if not any(end in answer.partition("answer")[2] for end in ends):
                    raise InputError(
                        f"template {self.name}: nothing ends the answer {answer!r}; write `eos_token` or one of its "
                        "stop_tokens behind every answer, where the loss covers it"
                    )

    def segments(self, turns: list[dict]) -> Segments:
        """Return a conversation as segments; joined, they are the rendered template without its beginning-of-sequence
        token, which `MGMProcessor.encode` puts.

        An answer begins where the prompt ends with which the model is asked for it.

        Args:
            turns: LLaVA's {from, value}, human and gpt in turn. `<image>` marks where the image's tokens go.

        Raises:
            InputError: the template refuses the conversation, or does not tell where an answer begins.
        """
        segments = self._marked(turns) if GENERATION.search(self.source) else self._compared(turns)
        return list(self._divided(self._without_bos(segments)))

    def prompt(self, question: str, shows_image: bool = True) -> str:
        """The text up to where the answer begins, for generation about one image, or about none.

        Raises:
            InputError: the question holds a control token, or the template refuses it.
        """
        if token := find_control(question, self.control_tokens):
            raise InputError(f"the question {question[:80]!r} holds the control token {token}; ask without it")
        turns = _turns(question)[:1] if shows_image else [{"from": "human", "value": question}]
        text = self._render(turns, add_generation_prompt=True)[0]
        return text.removeprefix(self.special_tokens["bos_token"])

    def stops(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens that end an answer.

        Raises:
            InputError: the tokenizer does not know one of them.
        """
        stops = [tokenizer.eos_token_id]
        for token in self.stop_tokens:
            ids = tokenizer(token, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise InputError(
                    f"template {self.name}: the model's tokenizer has no token {token}; name its own template"
                )
            stops += ids
        return stops

    def _marked(self, turns: list[dict]) -> Segments:
        """Return the answers that the template marks, each with blanks before it that are not in the prompt."""
        text, spans = self._render(turns)
        if not spans:
            raise InputError(f"template {self.name}: it marks no answer; {REMEDY}")
        asked = [self._render(turns[:count], add_generation_prompt=True)[0] for count in range(1, len(turns), 2)]
        prompts = {len(prompt) for prompt in asked if text.startswith(prompt)}
        segments, end = [], 0
        for start, stop in spans:
            begin = max((length for length in prompts if end <= length <= stop), default=None)
            if begin is None or text[begin:start].strip():
                shown = f"a prompt ends with {asked[0][-40:]!r}, and before an answer stands {text[end:start][-40:]!r}"
                raise InputError(
                    f"template {self.name}: it asks in another way than it marks answers: {shown}; {REMEDY}"
                )
            segments += [(text[end:begin], False), (text[begin:stop], True)]
            end = stop
        return [*segments, (text[end:], False)] if end < len(text) else segments

    def _compared(self, turns: list[dict]) -> Segments:
        """Answers are the difference between a conversation and the prompt for its last turn."""
        segments, before = [], ""
        for count in range(2, len(turns) + 1, 2):
            prompt = self._render(turns[: count - 1], add_generation_prompt=True)[0]
            text = self._render(turns[:count])[0]
            if not (prompt.startswith(before) and text.startswith(prompt)):
                raise InputError(f"template {self.name}: it does not tell where an answer begins; {REMEDY}")
            segments += [(prompt[len(before) :], False), (text[len(prompt) :], True)]
            before = text
        return segments

    def _divided(self, segments: Segments) -> Iterator[tuple[str, bool]]:
        """Yield the segments, with the text that ends an answer as one of its own if it is plain text."""
        for text, is_answer in segments:
            place = max((text.rfind(stop) for stop in self.apart), default=-1) if is_answer else -1
            if place > 0:
                yield text[:place], True
                yield text[place:], True
            else:
                yield text, is_answer

    def _render(self, turns: Iterable[dict], **options: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where marked answers are in it."""
        try:
            return render(self.source, [_message(turn) for turn in turns], **options, **self.special_tokens)
        except InputError as error:
            raise InputError(f"template {self.name}: it cannot be rendered ({error}); {REMEDY}") from None

    def _without_bos(self, segments: Segments) -> Segments:
        (first, is_answer), *others = segments
        return [(first.removeprefix(self.special_tokens["bos_token"]), is_answer), *others]


def _turns(question: str, answer: str = "") -> list[dict]:
    """One question and one answer about one image."""
    value = f"{IMAGE_TOKEN}\n{question}" if question else IMAGE_TOKEN
    return [{"from": "human", "value": value}, {"from": "gpt", "value": answer}]


def _message(turn: dict) -> dict[str, str]:
    value = _image_first(turn["value"]) if turn["from"] == "human" else turn["value"]
    return {"role": ROLES[turn["from"]], "content": value}


def _image_first(text: str) -> str:
    """MGM puts the image at the beginning of its turn, wherever the data has it."""
    if IMAGE_TOKEN not in text:
        return text
    return f"{IMAGE_TOKEN}\n{text.replace(IMAGE_TOKEN, '').strip()}".strip()
