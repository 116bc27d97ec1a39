"""Conversations and questions as a processor of transformers puts them."""

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from itertools import chain

import torch
from PIL import Image
from torch.nn.functional import pad
from transformers import ProcessorMixin

from dj2mgm.control_tokens import find_control
from dj2mgm.data.chat_rendering import render
from dj2mgm.data.formats import IMAGE_TOKEN, conversation, images_of
from dj2mgm.data.images import BadImage, image_size, load_image
from dj2mgm.errors import InputError
from dj2mgm.mgm.modeling_mgm import positions_of_answers
from dj2mgm.vision_language import IGNORED

ROLES = {"human": "user", "gpt": "assistant"}
OF_KINDS = ("token_type_ids", "mm_token_type_ids")
OF_TOKENS = ("input_ids", "labels", *OF_KINDS)  # (1, T); everything else is of images
THINKING = "enable_thinking"  # of templates whose models think before they answer, unless this is False
MARK = "\ue000"  # of Unicode's private use: where an answer begins
BLANK = (56, 56)  # px
LINE_BREAK = "\n"


class ProcessorEncoder:
    """One image to a conversation, or none, as the processor's own chat template puts it."""

    fillers = dict.fromkeys(OF_TOKENS, 0) | {"labels": IGNORED}
    reads_text_alone = True
    tower_inputs: Callable[[dict], dict] | None = None  # of a batch, for towers that read more than pixels

    def __init__(self, processor: ProcessorMixin, image_token_id: int, max_length: int):
        self.processor, self.tokenizer = processor, processor.tokenizer
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.image_token_id = image_token_id
        self.max_length = sys.maxsize
        added = self.tokenizer.added_tokens_decoder
        self.special = {token.content: number for number, token in added.items() if token.special}
        self.control_tokens = self._control_tokens()
        self._size = lru_cache(maxsize=16)(image_size)  # a row is asked for it twice
        self._placeholders = lru_cache(maxsize=4096)(self._replacements)
        self._tokens_from_special = lru_cache(maxsize=4096)(self._tokenized_alone)
        given = self._processed(sample_row(1), [Image.new("RGB", BLANK)])
        self._tells_images = {
            name: given[name].tolist() == self.processor.create_mm_token_type_ids(given["input_ids"].tolist())
            for name in OF_KINDS
            if name in given
        }
        self._short = self.sample(BLANK)
        self._blank = self._short | {"labels": [IGNORED] * len(self._short["labels"])}
        self.max_length = max_length

    def tokens(self, row: dict) -> tuple[int, int]:
        try:
            replacements = self._placeholders(*self._sizes(row))
        except (BadImage, ValueError) as error:  # some processors take no image that is very long
            raise InputError(f"row {row['id']}: {error}; replace the image, or delete the row") from None
        item = self._encoded(row, replacements)
        return len(item["input_ids"]), len(item["labels"]) - item["labels"].count(IGNORED)

    def item(self, row: dict | None) -> dict:
        if row is None:
            return self._blank
        return self._item(row, list(map(load_image, images_of(row))))

    def text_item(self, row: dict, replacement: str) -> dict:
        """The tokens of `item`, where `look` has put `replacement` in the place of the row's image."""
        encoded = self._encoded(row, [replacement])
        kinds = self._kinds(torch.tensor([encoded["input_ids"]]))
        return encoded | {name: values[0].tolist() for name, values in kinds.items()}

    def pixels(self, row: dict) -> int:
        """Of all images of a conversation."""
        return sum(width * height for width, height in self._sizes(row))

    def sample(self, *sizes: tuple[int, int]) -> dict:
        """The item of a question and an answer of one letter about blank images of `sizes` pixels."""
        return self._item(sample_row(len(sizes)), [Image.new("RGB", size) for size in sizes])

    def _sizes(self, row: dict) -> list[tuple[int, int]]:
        return [self._size(image) for image in images_of(row)]

    def _item(self, row: dict, images: list[Image.Image]) -> dict:
        replacements = self._placeholders(*(image.size for image in images))
        item = self._encoded(row, replacements)
        output = self._processed(row, images)
        given = output.pop("input_ids")[0].tolist()
        kinds = {name: output.pop(name)[0].tolist() for name in set(output) & set(OF_KINDS)}
        if given[: len(item["input_ids"])] != item["input_ids"]:
            text, _ = self._with_replacements(row, replacements)
            if given != self.tokenizer(text, add_special_tokens=self._adds_bos(text))["input_ids"]:
                raise RuntimeError(f"row {row['id']}: the processor's tokens are not those that were counted")
            own = self._kinds(torch.tensor([item["input_ids"]]))  # an answer was tokenized apart from its prompt
            kinds = {name: values[0].tolist() for name, values in own.items()}
        return item | {name: values[: len(item["input_ids"])] for name, values in kinds.items()} | dict(output)

    def batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """No attention mask: under causal attention nothing looks at what stands to its right.

        Items without an image get one more beside them, of a blank image and without loss: what stage 1 trains must
        have a gradient in every micro batch, and under ZeRO-3 all processes gather the towers' weights together.
        """
        if not any(item.keys() - {"labels", *OF_TOKENS} for item in items):
            items = [*items, self._blank]
            width = max(width, len(self._blank["input_ids"]))
        of_images = dict.fromkeys(name for item in items for name in item if name not in OF_TOKENS)
        batch = self.text_batch(items, width) | {
            name: joined([item[name] for item in items if name in item]) for name in of_images
        }
        return batch | self.tower_inputs(batch) if self.tower_inputs else batch

    def text_batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """The tokens of `batch`."""
        fillers = self.fillers | {"input_ids": self.tokenizer.pad_token_id or 0}
        batch = {}
        for name in [name for name in OF_TOKENS if any(name in item for item in items)]:
            rows = [item.get(name, []) for item in items]
            batch[name] = torch.tensor([row + [fillers[name]] * (width - len(row)) for row in rows])
        return batch | {"answer_positions": positions_of_answers(batch["labels"])}

    def try_out(self) -> None:
        """What a template or processor cannot do at all, it cannot do with a blank image.

        Raises:
            InputError: the model looks for another token than the processor writes.
        """
        if self.image_token_id not in self._short["input_ids"]:
            raise InputError(f"its processor never writes the image_token_id of config.json, {self.image_token_id}")
        self.batch([self._blank], len(self._blank["input_ids"]))
        self.prompts([self.look(Image.new("RGB", BLANK))[1]], ["a"])

    @property
    def stops(self) -> frozenset[int]:
        return frozenset({self.tokenizer.eos_token_id, self.end_of_turn} - {None})

    @property
    def end_of_turn(self) -> int:
        """The token with which an answer ends."""
        return next(label for label in reversed(self._short["labels"]) if label != IGNORED)

    def _control_tokens(self) -> tuple[str, ...]:
        """What the tokenizer would take for more than text, as far as it is special or the chat template writes it."""
        written = self._rendered(self._messages(conversation("", "", "a", "a")), True)
        control = set(self.special) | {token for token in self.tokenizer.get_added_vocab() if token in written}
        return tuple(sorted(token for token in control - {IMAGE_TOKEN} if token.strip()))

    def look(self, image: Image.Image) -> tuple[dict[str, torch.Tensor], str]:
        """What the processor gives the model of an image, and what it puts in its place in a text.

        Raises:
            InputError: the model does not take the image.
        """
        try:
            inputs, [replacement] = self._process_images([image], return_tensors="pt")
        except ValueError as error:  # some processors take no image that is very long
            raise InputError(f"an image of {image.size} pixels cannot be looked at: {error}; delete its rows") from None
        return {name: values for name, values in inputs.items() if isinstance(values, torch.Tensor)}, replacement

    def prompts(self, replacements: list[str | None], questions: list[str]) -> dict[str, torch.Tensor]:
        """Questions about an image each, up to where the answer begins; padded on the left.

        Args:
            replacements: what `look` puts in the place of each question's image; None: it is asked without one.

        Raises:
            InputError: a question holds a control token.
        """
        for question in questions:
            if token := find_control(question, self.control_tokens):
                raise InputError(f"the question {question!r} holds the control token {token}; ask without it")
        texts = list(map(self._prompt, replacements, questions))
        side, self.tokenizer.padding_side = self.tokenizer.padding_side, "left"
        try:
            encoded = self.tokenizer(
                texts, add_special_tokens=self._adds_bos(texts[0]), padding=True, return_tensors="pt"
            )
        finally:
            self.tokenizer.padding_side = side
        tokens = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        return tokens | self._kinds(tokens["input_ids"])

    def _kinds(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model reads beside tokens, (B, T): mostly which of them are of an image."""
        return {
            name: torch.as_tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
            if tells_images
            else torch.zeros_like(ids)
            for name, tells_images in self._tells_images.items()
        }

    def _prompt(self, replacement: str | None, question: str) -> str:
        turns = conversation("", "", question, "")["conversations"][:1]
        if replacement is None:
            return self._rendered(self._messages({"conversations": [turns[0] | {"value": question}]}), True)
        text = self._rendered(self._messages({"conversations": turns}), True)
        return text.replace(self.processor.image_token, replacement, 1)

    def _messages(self, row: dict) -> list[dict]:
        messages = []
        for turn in row["conversations"]:
            text = turn["value"]
            shown = text.count(IMAGE_TOKEN) if turn["from"] == "human" else 0
            # by a blank, so that no control token arises
            content = [{"type": "text", "text": text.replace(IMAGE_TOKEN, " ").strip()}]
            if shown == 1:
                content.insert(0, {"type": "image"})
            elif shown:
                texts = [{"type": "text", "text": part.strip()} for part in text.split(IMAGE_TOKEN)]
                between = [[{"type": "image"}, *([part] if part["text"] else [])] for part in texts[1:]]
                content = [*([texts[0]] if texts[0]["text"] else []), *chain.from_iterable(between)]
            messages.append({"role": ROLES[turn["from"]], "content": content})
        return messages

    def _rendered(self, messages: list[dict], asks: bool = False) -> str:
        templates = self.processor.chat_template
        source = templates["default"] if isinstance(templates, dict) else templates
        variables = dict(self.tokenizer.special_tokens_map) | {"add_generation_prompt": asks}
        if THINKING in source:
            variables[THINKING] = False
        try:
            return render(source, messages, **variables)[0]
        except InputError as error:
            raise InputError(f"its chat template cannot be rendered ({error})") from None

    def _answers(self, row: dict) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation, and where its answers begin and end.

        An answer begins where the prompt ends with which the model is asked for it, so the blank between LLaVA's
        `ASSISTANT:` and an answer belongs to the answer. It ends with the last special token that the template writes
        behind it. If there is none, the end-of-sequence token ends it, as LLaVA is trained, and blanks that the
        template writes behind an answer are left out, as is everything behind the last answer.

        Raises:
            InputError: The template writes an answer in another way once another turn follows, leads to an answer in
                another way when the model is asked, or nothing can end an answer.
        """
        messages = self._messages(row)
        text, spans, before = "", [], ""
        for number in range(1, len(messages), 2):
            asked, until = self._rendered(messages[:number], True), self._rendered(messages[: number + 1])
            begin, end = self._answer_in(until, messages[: number + 1])
            if begin < 0 or not (until.startswith(before) and asked.startswith(before)):
                raise InputError(
                    f"row {row['id']}: the model's chat template does not tell where an answer begins, or writes it in "
                    "another way once more turns follow; divide the row into rows of one question"
                )
            if asked.split() != until[:begin].split():
                raise InputError(
                    f"its chat template leads to an answer by {asked[-40:]!r}, and in training by "
                    f"{until[:begin][-40:]!r}, as that of a model does that thinks first; use a model of its family "
                    "that does not, or another template"
                )
            text += asked[len(before) :]
            start = len(asked) if until.startswith(asked) else begin
            answer, said = until[start:], max(0, end - start)  # `said`: blanks before its own words, and these
            ends = [place + len(token) for token in self.special if (place := answer.rfind(token, said)) >= 0]
            is_last = number + 1 == len(messages)
            if not ends:
                if self.tokenizer.eos_token is None:
                    raise InputError(
                        "neither its chat template nor its tokenizer has a token that ends an answer; use another "
                        "template"
                    )
                behind = "" if is_last or not answer[said:].strip() else answer[said:]
                answer = answer[:said] + self.tokenizer.eos_token
                ends = [len(answer)]
                answer += behind
            spans.append((len(text), len(text) + max(ends)))
            text, before = text + answer, until
        return text, spans

    def _answer_in(self, text: str, messages: list[dict]) -> tuple[int, int]:
        """Where the last of the messages, which is the end of the text, has its own words; negative if that is not
        known."""
        answer = messages[-1]["content"][0]["text"]
        mark = MARK
        while mark in text:
            mark += MARK
        marked = [*messages[:-1], messages[-1] | {"content": [{"type": "text", "text": mark}]}]
        begin = self._rendered(marked).find(mark)
        return (begin, begin + len(answer)) if text[begin:].startswith(answer) else (-1, -1)

    def _encoded(self, row: dict, replacements: list[str]) -> dict[str, list[int]]:
        """Token ids, image tokens included, and labels, without an image being looked at."""
        ids, labels = self._labelled(*self._with_replacements(row, replacements))
        if self.image_token_id in ids[self.max_length :]:
            raise InputError(f"row {row['id']}: its image lies beyond max_length {self.max_length}; raise it")
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def _with_replacements(self, row: dict, replacements: list[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return what `_answers` returns, with the tokens of the row's images."""
        text, spans = self._answers(row)
        token, after = self.processor.image_token, 0
        for replacement in replacements:
            begin = text.find(token, after)
            if begin < 0:
                raise InputError(f"row {row['id']}: the model's chat template writes no {token} for its image")
            text = text[:begin] + replacement + text[begin + len(token) :]
            grown, after = len(replacement) - len(token), begin + len(replacement)
            spans = [(start + grown * (start > begin), end + grown * (end > begin)) for start, end in spans]
        return text, spans

    def _labelled(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and the same as labels at its answers.

        The tokens before an answer are those of the prompt with which the model is asked for it. If the tokenizer would
        join or divide them in another way because an answer follows, prompt and answer are tokenized separately.

        Args:
            spans: Where answers begin and end in the text.
        """
        encoded = self.tokenizer(text, add_special_tokens=self._adds_bos(text), return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        answers = []
        for begin, stop in spans:
            first, prompt = self._end_of_prompt(text[:begin], ids[: bisect_left(starts, begin)])
            answer, end = first + len(prompt), bisect_left(starts, stop)
            if ids[first:answer] != prompt:
                alone = prompt + self._tokens_within(text[begin:stop])
                ids[first:end] = alone
                starts[first:end] = [begin] * len(alone)
                end = first + len(alone)
            answers.append((answer, end))
        labels = [IGNORED] * len(ids)
        for begin, end in answers:
            labels[begin:end] = ids[begin:end]
        return ids, labels

    def _end_of_prompt(self, prompt: str, ids: list[int]) -> tuple[int, list[int]]:
        """Return the tokens of a prompt from its last special token on, by itself, and where they begin.

        Tokenizers divide text at special tokens first, so nothing before the last one depends on what follows the
        prompt.

        Args:
            ids: The tokens of the text of which the prompt is the beginning, as far as they begin in the prompt.
        """
        place = max((prompt.rfind(token) for token in self.special), default=-1)
        if place < 0:
            return 0, self.tokenizer(prompt, add_special_tokens=self._adds_bos(prompt))["input_ids"]
        numbers = set(self.special.values())
        first = next(number for number in reversed(range(len(ids))) if ids[number] in numbers)
        return first, self._tokens_from_special(prompt[place:])

    def _tokenized_alone(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokens_within(self, text: str) -> list[int]:
        """Return the tokens of a text that other text precedes, without what a tokenizer puts before a first word.

        Raises:
            InputError: The tokenizer joins everything with what precedes it.
        """
        lead, ids = self._tokenized_alone(LINE_BREAK), self._tokenized_alone(LINE_BREAK + text)
        if ids[: len(lead)] != lead:
            raise InputError(
                f"its tokenizer joins the answer {text[:40]!r} with the text before it; use a chat template that "
                "writes a line break before an answer"
            )
        return ids[len(lead) :]

    def _processed(self, row: dict, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """Everything that the processor gives for the row."""
        text, _ = self._answers(row)
        output = self.processor(
            text=[text],
            images=[images] if images else None,
            add_special_tokens=self._adds_bos(text),
            return_tensors="pt",
        )
        return {name: values for name, values in output.items() if name != "attention_mask"}

    def _adds_bos(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _replacements(self, *sizes: tuple[int, int]) -> list[str]:
        """What the processor puts in the place of each image of a conversation; sizes are (width, height)."""
        if not sizes:
            return []
        return self._process_images([Image.new("RGB", size) for size in sizes])[1]

    def _process_images(self, images: list[Image.Image], **more) -> tuple[dict, list[str]]:
        """Of one conversation: what the model reads, and what stands in their place in its text."""
        kwargs = self.processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]
        return self.processor._process_images([images], **kwargs | more)


def sample_row(images: int) -> dict:
    """Return a question and an answer of one letter about a number of images."""
    row = conversation("", "", "a", "a")
    row["conversations"][0]["value"] = IMAGE_TOKEN * images + "a"
    return row


def joined(values: list[torch.Tensor]) -> torch.Tensor:
    """Along their first dimension; the second, tiles of an image, is padded to the greatest."""
    if values[0].dim() > 2:
        greatest = max(value.shape[1] for value in values)
        values = [pad(v, (0, 0) * (v.dim() - 2) + (0, greatest - v.shape[1])) for v in values]
    return torch.cat(values)
