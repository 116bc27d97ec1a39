"""Conversations and questions as a processor of transformers puts them."""

import copy
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import chain

import torch
from PIL import Image
from torch.nn.functional import pad
from transformers import ProcessorMixin

from dj2mgm.control_tokens import find_control
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
        self._short = self.sample(BLANK)
        self._tells_images = {
            name: self._short[name] == self.processor.create_mm_token_type_ids([self._short["input_ids"]])[0]
            for name in OF_KINDS
            if name in self._short
        }
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
        row = conversation("", "", "a", "a")
        row["conversations"][0]["value"] = IMAGE_TOKEN * len(sizes) + "a"
        return self._item(row, [Image.new("RGB", size) for size in sizes])

    def _sizes(self, row: dict) -> list[tuple[int, int]]:
        return [self._size(image) for image in images_of(row)]

    def _item(self, row: dict, images: list[Image.Image]) -> dict:
        item = self._encoded(row, self._placeholders(*(image.size for image in images)))
        output = self._processed(row, images)
        given = output.pop("input_ids")[0].tolist()[: len(item["input_ids"])]
        if given != item["input_ids"][: len(given)]:
            raise RuntimeError(f"row {row['id']}: the processor's tokens are not those that were counted")
        for name in set(output) & set(OF_TOKENS):
            values = output.pop(name)[0].tolist()
            item[name] = (values + [0] * len(item["input_ids"]))[: len(item["input_ids"])]
        return item | dict(output)

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
        switches = {THINKING: False} if THINKING in str(self.processor.chat_template) else {}
        return self.processor.apply_chat_template(
            copy.deepcopy(messages),  # since it may change them
            tokenize=False,
            add_generation_prompt=asks,
            **switches,
        )

    def _answers(self, row: dict) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, and where in it answers stand, up to the special token that ends their turns.

        What a template writes behind the last answer is cut off unless a special token is in it: the end-of-sequence
        token then ends it, as LLaVA is trained. Before the last answer stands what stands there when the model is
        asked, where a template has other blanks there.

        Raises:
            InputError: the template does not keep what it has written once another turn comes; or it leads to an
                answer in another way when the model is asked.
        """
        messages = self._messages(row)
        text, spans = self._rendered(messages), []
        for number in range(1, len(messages), 2):
            until = text if number + 1 == len(messages) else self._rendered(messages[: number + 1])
            begin, end = self._answer_in(until, messages[: number + 1])
            if begin < 0 or not text.startswith(until):
                raise InputError(
                    f"row {row['id']}: the model's chat template does not tell where an answer begins, or writes it in "
                    "another way once more turns follow; divide the row into rows of one question"
                )
            ends = [place + len(token) for token in self.special if (place := until.rfind(token, end)) >= 0]
            spans.append((begin, max(ends, default=end)))
        if not ends:
            text = until[:end]
        asked, shown = self._rendered(messages[:-1], True), text[:begin]
        if asked.split() != shown.split():
            raise InputError(
                f"its chat template leads to an answer by {asked[-40:]!r}, and in training by {shown[-40:]!r}, as that "
                "of a model does that thinks first; use a model of its family that does not, or another template"
            )
        if not shown.startswith(asked):  # else a blank may begin the answer's first token
            text, spans[-1] = asked + text[begin:], (len(asked), spans[-1][1] + len(asked) - begin)
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
        text, spans = self._answers(row)
        token, after = self.processor.image_token, 0
        for replacement in replacements:
            begin = text.find(token, after)
            if begin < 0:
                raise InputError(f"row {row['id']}: the model's chat template writes no {token} for its image")
            text = text[:begin] + replacement + text[begin + len(token) :]
            grown, after = len(replacement) - len(token), begin + len(replacement)
            spans = [(start + grown * (start > begin), end + grown * (end > begin)) for start, end in spans]
        encoded = self.tokenizer(text, add_special_tokens=self._adds_bos(text), return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        labels = [
            token_id if any(start < stop and begin < end <= stop for begin, stop in spans) else IGNORED
            for token_id, (start, end) in zip(ids, offsets, strict=True)
        ]
        if spans[-1][1] == len(text) and ids[-1] not in self.special.values():
            ids, labels = [*ids, self.tokenizer.eos_token_id], [*labels, self.tokenizer.eos_token_id]
        if self.image_token_id in ids[self.max_length :]:
            raise InputError(f"row {row['id']}: its image lies beyond max_length {self.max_length}; raise it")
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

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


def joined(values: list[torch.Tensor]) -> torch.Tensor:
    """Along their first dimension; the second, tiles of an image, is padded to the greatest."""
    if values[0].dim() > 2:
        greatest = max(value.shape[1] for value in values)
        values = [pad(v, (0, 0) * (v.dim() - 2) + (0, greatest - v.shape[1])) for v in values]
    return torch.cat(values)
