"""Chat templates: conversations as the text that the language model reads, with the spans of answers.

A template is Jinja, rendered as in transformers, but in a process with limits, since it may come with a model's folder.
config/chat_templates contains the templates of the published MGM (`plain`, `gemma`) and of Qwen (`chatml`).

Each process starts one renderer process, which ends when its parent ends. A template is compiled there too: Jinja
computes constant expressions, such as `'a' * 10**10`, when it compiles.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from dj2mgm.data import chat_template_process
from dj2mgm.data.chat_template_process import CPU_S, MEMORY_LIMIT, OUT_OF_MEMORY
from dj2mgm.data.formats import CHAT_ROLES, IMAGE_TOKEN
from dj2mgm.errors import InputError
from dj2mgm.settings.models import OF_THE_TOKENIZER, read_chat_template
from dj2mgm.settings.string_formats import find_control_token

Spans = list[tuple[int, int]]
SHOWN_CHARACTERS = 200  # characters of a template's error
Segments = list[tuple[str, bool]]  # text, and whether it is an answer, which the loss covers
GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
ANSWER_SEPARATOR = "\ue000"  # separates answers in a check; a character of Unicode's private use area
TEMPLATE_REMEDY = "write the template as a file in config/chat_templates and set its name (docs/models.md)"


class _Renderer:
    """Process that renders, and the names of the templates that it has compiled."""

    def __init__(self):
        command = [sys.executable, "-I", chat_template_process.__file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.compiled: set[str] = set()

    def ask(self, source: str, variables: dict) -> dict:
        """Send a request and return the answer; after an InputError, the next request needs a new process."""
        name = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        request = {"name": name, "variables": variables} | ({} if name in self.compiled else {"source": source})
        line = b""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        answer = json.loads(line) if line.endswith(b"\n") else None
        if answer is None or answer.get("problem") == OUT_OF_MEMORY:
            raise InputError(self._end())
        self.compiled.add(name)
        return answer

    def _end(self) -> str:
        """End the process; return a message about the limit that it reached."""
        with contextlib.suppress(BrokenPipeError):  # closing sends what the renderer never read
            self.process.stdin.close()
        self.process.stdout.close()
        if self.process.wait() == -signal.SIGPROF:
            return f"it takes more than {CPU_S:g} s for one conversation"
        return f"it takes more than {MEMORY_LIMIT >> 20} MiB of memory for one conversation"


_lock = threading.Lock()
_renderer: _Renderer | None = None


def _forget() -> None:
    """Leave the renderer to the parent process after a fork."""
    global _lock, _renderer
    _lock, _renderer = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def render_chat(source: str, messages: list[dict], **variables: object) -> tuple[str, Spans]:
    """Render a conversation as transformers' `apply_chat_template` does.

    Args:
        messages: messages in transformers' format, of plain values.
        variables: variables of the template, such as `add_generation_prompt` and special tokens.

    Returns:
        The text, and the spans of answers that `{% generation %}` marks in it.
    """
    global _renderer
    variables = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
    with _lock:
        if _renderer is None:
            _renderer = _Renderer()
        try:
            answer = _renderer.ask(source, variables | {"messages": messages})
        except BaseException:  # also an interrupt: the next answer would belong to this request
            _renderer.process.kill()
            _renderer = None
            raise
    if problem := answer.get("problem"):
        raise InputError(" ".join(problem.split())[:SHOWN_CHARACTERS])
    return answer["text"], [(begin, end) for begin, end in answer["spans"]]


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template for one tokenizer."""

    name: str
    # Jinja template. If it does not mark answers with `{% generation %}`, an answer is the text that a turn of the
    # model adds to its prompt
    source: str
    stop_tokens: tuple[str, ...]  # tokens that end an answer, in addition to the tokenizer's end-of-sequence token
    control_tokens: tuple[str, ...]  # tokens that must not occur in questions and answers
    special_tokens: dict[str, str]  # variables of the template, such as `eos_token`
    # the stop tokens that are plain text to the tokenizer, such as a line break. They are tokenized separately from the
    # answer, because a tokenizer may merge both (Qwen's has a token for a full stop with a line break)
    plain_stops: tuple[str, ...] = ()
    asks_question: bool = True  # whether the template contains the question

    @classmethod
    def load(cls, template: str | dict, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the chat template for a tokenizer, by name (settings/models.py) or from its content.

        Raises:
            InputError: the name is unknown, the tokenizer has no chat template of its own, or nothing ends an answer.
        """
        content = read_chat_template(template) if isinstance(template, str) else template
        special_tokens = {"bos_token": "", "eos_token": ""} | dict(tokenizer.special_tokens_map)
        if content["name"] == OF_THE_TOKENIZER:
            return cls._load_from_tokenizer(tokenizer, special_tokens)
        tokens = tuple(content["stop_tokens"]), tuple(content["control_tokens"])
        plain_stops = tuple(token for token in content["stop_tokens"] if token not in tokenizer.get_added_vocab())
        asks = content.get("asks_question", True)
        template = cls(content["name"], content["chat_template"], *tokens, special_tokens, plain_stops, asks)
        template._check_ends()
        return template

    @classmethod
    def _load_from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, special_tokens: dict[str, str]) -> Self:
        """Return the tokenizer's own template; an answer ends with the first special token after it."""
        source, control_tokens = tokenizer.chat_template, tuple(tokenizer.all_special_tokens)
        if not isinstance(source, str):
            raise InputError(
                f"template {OF_THE_TOKENIZER}: the model's tokenizer has no chat template; {TEMPLATE_REMEDY}"
            )
        template = cls(OF_THE_TOKENIZER, source, (), control_tokens, special_tokens)
        text = "".join(text for text, _ in template.render_segments(_build_turns("question", "answer")))
        rest = tokenizer.tokenize(text.rpartition("answer")[2])
        stops = tuple(token for token in rest if token in control_tokens)[:1]
        template = cls(OF_THE_TOKENIZER, source, stops, control_tokens, special_tokens)
        template._check_ends()
        return template

    def _check_ends(self) -> None:
        """Raise InputError unless a token ends every answer, because a model would not learn to stop otherwise."""
        ends = [end for end in (self.special_tokens["eos_token"], *self.stop_tokens) if end]
        turns = _build_turns("question", "answer")
        several = [*turns, {"from": "human", "value": "question"}, turns[1]]
        for conversation in (turns, several):
            try:
                segments = self.render_segments(conversation)
            except InputError:
                if conversation is turns:
                    raise
                break  # the template allows one question only; rows with more are refused
            answers = "".join(text if is_answer else ANSWER_SEPARATOR for text, is_answer in segments)
            for answer in filter(None, answers.split(ANSWER_SEPARATOR)):
                if not any(end in answer.partition("answer")[2] for end in ends):
                    raise InputError(
                        f"template {self.name}: no token ends the answer {answer!r}; write `eos_token` or one of its "
                        "stop_tokens after every answer, inside the part that the loss covers"
                    )

    def render_segments(self, turns: list[dict]) -> Segments:
        """Return a conversation as segments.

        Joined, they are the rendered template without its beginning-of-sequence token, which `MGMProcessor.encode`
        adds. An answer begins at the end of the prompt that generation uses.

        Args:
            turns: LLaVA's {from, value}, alternating human and gpt. `<image>` marks the position of the image's tokens.

        Raises:
            InputError: the template refuses the conversation, or the beginning of an answer cannot be determined.
        """
        segments = (
            self._segment_by_marks(turns) if GENERATION_TAG.search(self.source) else self._segment_by_comparison(turns)
        )
        return list(self._split_ends(self._remove_bos(segments)))

    def check_question(self, question: str) -> None:
        """Check that the template does not leave the question out, since the model would then answer without it."""
        if question and not self.asks_question:
            raise InputError(
                f"template {self.name} leaves out the question {question[:80]!r}; name the chat template of stage 2, "
                "which the model's file has as template (docs/models.md)"
            )

    def render_prompt(self, question: str, shows_image: bool = True) -> str:
        """Return the text before the answer, for generation with or without an image."""
        self.check_question(question)
        if token := find_control_token(question, self.control_tokens):
            raise InputError(f"the question {question[:80]!r} contains the control token {token}; remove it")
        turns = _build_turns(question)[:1] if shows_image else [{"from": "human", "value": question}]
        text = self._render(turns, add_generation_prompt=True)[0]
        return text.removeprefix(self.special_tokens["bos_token"])

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        stops = [tokenizer.eos_token_id]
        for token in self.stop_tokens:
            ids = tokenizer(token, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise InputError(
                    f"template {self.name}: the model's tokenizer has no token {token}; use the tokenizer's own "
                    "template"
                )
            stops += ids
        return stops

    def _segment_by_marks(self, turns: list[dict]) -> Segments:
        """Return the marked answers as segments; each begins with the blanks that are not part of the prompt."""
        text, spans = self._render(turns)
        if not spans:
            raise InputError(f"template {self.name}: it marks no answer; {TEMPLATE_REMEDY}")
        rendered = [self._render(turns[:count], add_generation_prompt=True)[0] for count in range(1, len(turns), 2)]
        prompts = {len(prompt) for prompt in rendered if text.startswith(prompt)}
        segments, end = [], 0
        for start, stop in spans:
            begin = max((length for length in prompts if end <= length <= stop), default=None)
            if begin is None or text[begin:start].strip():
                ends = f"{rendered[0][-40:]!r} ends a prompt, and {text[end:start][-40:]!r} precedes an answer"
                raise InputError(
                    f"template {self.name}: its prompts and its marked answers do not match: {ends}; {TEMPLATE_REMEDY}"
                )
            segments += [(text[end:begin], False), (text[begin:stop], True)]
            end = stop
        return [*segments, (text[end:], False)] if end < len(text) else segments

    def _segment_by_comparison(self, turns: list[dict]) -> Segments:
        """Return segments; answers are the difference between a conversation and the prompt for its last turn."""
        segments, before = [], ""
        for count in range(2, len(turns) + 1, 2):
            prompt = self._render(turns[: count - 1], add_generation_prompt=True)[0]
            text = self._render(turns[:count])[0]
            if not (prompt.startswith(before) and text.startswith(prompt)):
                raise InputError(
                    f"template {self.name}: the beginning of an answer cannot be determined; {TEMPLATE_REMEDY}"
                )
            segments += [(prompt[len(before) :], False), (text[len(prompt) :], True)]
            before = text
        return segments

    def _split_ends(self, segments: Segments) -> Iterator[tuple[str, bool]]:
        """Yield the segments, with the end of an answer as a segment of its own if it is plain text."""
        for text, is_answer in segments:
            start = max((text.rfind(stop) for stop in self.plain_stops), default=-1) if is_answer else -1
            if start > 0:
                yield text[:start], True
                yield text[start:], True
            else:
                yield text, is_answer

    def _render(self, turns: Iterable[dict], **options: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the spans of marked answers."""
        try:
            return render_chat(self.source, [_build_message(turn) for turn in turns], **options, **self.special_tokens)
        except InputError as error:
            raise InputError(f"template {self.name}: it cannot be rendered ({error}); {TEMPLATE_REMEDY}") from None

    def _remove_bos(self, segments: Segments) -> Segments:
        (first, is_answer), *others = segments
        return [(first.removeprefix(self.special_tokens["bos_token"]), is_answer), *others]


def _build_turns(question: str, answer: str = "") -> list[dict]:
    """Return one question and one answer about one image."""
    value = f"{IMAGE_TOKEN}\n{question}" if question else IMAGE_TOKEN
    return [{"from": "human", "value": value}, {"from": "gpt", "value": answer}]


def _build_message(turn: dict) -> dict[str, str]:
    value = _move_image_first(turn["value"]) if turn["from"] == "human" else turn["value"]
    return {"role": CHAT_ROLES[turn["from"]], "content": value}


def _move_image_first(text: str) -> str:
    """Move the image token to the beginning of the turn, as MGM does."""
    if IMAGE_TOKEN not in text:
        return text
    return f"{IMAGE_TOKEN}\n{text.replace(IMAGE_TOKEN, '').strip()}".strip()
