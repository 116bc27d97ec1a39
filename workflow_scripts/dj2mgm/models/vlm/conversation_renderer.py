"""Rendering of conversations with the chat template of a transformers processor, and the positions of the answers."""

from itertools import chain

from transformers import ProcessorMixin

from dj2mgm.data.chat_template import render_chat
from dj2mgm.data.formats import CHAT_ROLES, IMAGE_TOKEN
from dj2mgm.errors import InputError

THINKING_VARIABLE = (
    "enable_thinking"  # variable of chat templates; the model thinks before it answers, unless it is False
)
ANSWER_MARK = "\ue000"  # from Unicode's private use area; marks where an answer begins


class ConversationRenderer:
    """Renderer of conversations, with any number of images, by the processor's own chat template."""

    def __init__(self, processor: ProcessorMixin, special_tokens: tuple[str, ...]):
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.special_tokens = special_tokens

    def build_messages(self, row: dict) -> list[dict]:
        messages = []
        for turn in row["conversations"]:
            text = turn["value"]
            images = text.count(IMAGE_TOKEN) if turn["from"] == "human" else 0
            # replaced by a blank, so that the text around it cannot join to a control token
            content = [{"type": "text", "text": text.replace(IMAGE_TOKEN, " ").strip()}]
            if images == 1:
                content.insert(0, {"type": "image"})
            elif images:
                texts = [{"type": "text", "text": part.strip()} for part in text.split(IMAGE_TOKEN)]
                image_contents = [[{"type": "image"}, *([part] if part["text"] else [])] for part in texts[1:]]
                content = [*([texts[0]] if texts[0]["text"] else []), *chain.from_iterable(image_contents)]
            messages.append({"role": CHAT_ROLES[turn["from"]], "content": content})
        return messages

    def render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        templates = self.processor.chat_template
        source = templates["default"] if isinstance(templates, dict) else templates
        variables = dict(self.tokenizer.special_tokens_map) | {"add_generation_prompt": add_generation_prompt}
        if THINKING_VARIABLE in source:
            variables[THINKING_VARIABLE] = False
        try:
            return render_chat(source, messages, **variables)[0]
        except InputError as error:
            raise InputError(f"its chat template cannot be rendered ({error})") from None

    def render_answers(self, row: dict) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation, and the start and end of each answer.

        An answer begins where its generation prompt ends, so the blank between LLaVA's `ASSISTANT:` and an answer
        belongs to the answer. It ends with the last special token that the template writes after it. If there is none,
        the end-of-sequence token ends it, as in LLaVA's training. Blanks that the template writes after an answer are
        then left out, as is all text after the last answer.
        """
        messages = self.build_messages(row)
        text, spans, previous = "", [], ""
        for number in range(1, len(messages), 2):
            prompt, rendered = self.render(messages[:number], True), self.render(messages[: number + 1])
            begin, end = self._find_answer(rendered, messages[: number + 1])
            if begin < 0 or not (rendered.startswith(previous) and prompt.startswith(previous)):
                raise InputError(
                    f"row {row['id']}: the start of an answer cannot be found in the output of the model's chat "
                    "template, or changes if more turns follow; divide the row into rows of one question"
                )
            if prompt.split() != rendered[:begin].split():
                raise InputError(
                    f"its chat template writes {prompt[-40:]!r} before an answer for generation, but "
                    f"{rendered[:begin][-40:]!r} in training, as templates of reasoning models do; use a model of its "
                    "family without reasoning, or another template"
                )
            text += prompt[len(previous) :]
            start = len(prompt) if rendered.startswith(prompt) else begin
            answer, length = rendered[start:], max(0, end - start)  # length of the answer with the blanks before it
            ends = [
                position + len(token) for token in self.special_tokens if (position := answer.rfind(token, length)) >= 0
            ]
            is_last = number + 1 == len(messages)
            if not ends:
                if self.tokenizer.eos_token is None:
                    raise InputError(
                        "neither its chat template nor its tokenizer has a token that ends an answer; use another "
                        "template"
                    )
                following = "" if is_last or not answer[length:].strip() else answer[length:]
                answer = answer[:length] + self.tokenizer.eos_token
                ends = [len(answer)]
                answer += following
            spans.append((len(text), len(text) + max(ends)))
            text, previous = text + answer, rendered
        return text, spans

    def insert_replacements(self, row: dict, replacements: list[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return the result of `render_answers` with the replacements of the row's images inserted."""
        text, spans = self.render_answers(row)
        token, after = self.processor.image_token, 0
        for replacement in replacements:
            begin = text.find(token, after)
            if begin < 0:
                raise InputError(f"row {row['id']}: the model's chat template writes no {token} for its image")
            text = text[:begin] + replacement + text[begin + len(token) :]
            grown, after = len(replacement) - len(token), begin + len(replacement)
            spans = [(start + grown * (start > begin), end + grown * (end > begin)) for start, end in spans]
        return text, spans

    def _find_answer(self, text: str, messages: list[dict]) -> tuple[int, int]:
        """Return start and end of the last message's own text in the rendered messages; -1 if it is not found."""
        answer = messages[-1]["content"][0]["text"]
        mark = ANSWER_MARK
        while mark in text:
            mark += ANSWER_MARK
        marked = [*messages[:-1], messages[-1] | {"content": [{"type": "text", "text": mark}]}]
        begin = self.render(marked).find(mark)
        return (begin, begin + len(answer)) if text[begin:].startswith(answer) else (-1, -1)
