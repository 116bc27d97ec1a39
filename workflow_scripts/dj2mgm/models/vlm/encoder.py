"""Encoders of conversations and questions, with the chat template of a transformers processor or without one."""

import sys
from bisect import bisect_left
from functools import lru_cache

import torch
from PIL import Image
from torch.nn.functional import pad
from transformers import ProcessorMixin

from dj2mgm.data.formats import IMAGE_TOKEN, build_conversation, list_images
from dj2mgm.data.images import BadImageError, load_image, read_image_size
from dj2mgm.errors import InputError
from dj2mgm.models.greedy_search import pad_left
from dj2mgm.models.loss import find_answer_positions
from dj2mgm.models.vision_language import IGNORE_INDEX, check_image_fits
from dj2mgm.models.vlm.conversation_renderer import ConversationRenderer
from dj2mgm.models.vlm.packed_images import TowerInputs
from dj2mgm.settings.string_formats import find_control_token

TYPE_IDS = ("token_type_ids", "mm_token_type_ids")
TOKEN_FIELDS = ("input_ids", "labels", *TYPE_IDS)  # (1, T); all other fields of an item belong to its images
PIXEL_MASK = "pixel_attention_mask"  # ones and zeros, for which processors take eight bytes each
BLANK_IMAGE_SIZE = (56, 56)  # px
LINE_BREAK = "\n"
PREFIX, SUFFIX = 0, 1  # token_type_ids


class ProcessorEncoder:
    """Encoder of conversations with any number of images, formatted by the processor's own chat template.

    `tower_inputs` computes further values from a batch, for towers that read more than pixels.
    """

    fillers = dict.fromkeys(TOKEN_FIELDS, 0) | {"labels": IGNORE_INDEX}
    reads_text_alone = True

    def __init__(
        self, processor: ProcessorMixin, image_token_id: int, max_length: int, tower_inputs: TowerInputs | None
    ):
        self.processor, self.tokenizer = processor, processor.tokenizer
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.image_token_id, self.tower_inputs = image_token_id, tower_inputs
        self.max_length = sys.maxsize
        added = self.tokenizer.added_tokens_decoder
        self.special = {token.content: number for number, token in added.items() if token.special}
        self.renderer = ConversationRenderer(processor, tuple(self.special))
        self.control_tokens = self._find_control_tokens()
        self._read_size = lru_cache(maxsize=16)(read_image_size)  # needed twice for each row
        self._get_replacements = lru_cache(maxsize=4096)(self._make_replacements)
        self._tokenize_replacement = lru_cache(maxsize=64)(self._tokenize_alone)
        self._tokenize_from_special = lru_cache(maxsize=4096)(self._tokenize_alone)
        outputs = self._process(make_sample_row(1), [Image.new("RGB", BLANK_IMAGE_SIZE)])
        self._marks_images = {
            name: outputs[name].tolist() == self.processor.create_mm_token_type_ids(outputs["input_ids"].tolist())
            for name in TYPE_IDS
            if name in outputs
        }
        self._short_item = self.build_sample(BLANK_IMAGE_SIZE)
        self._blank_item = self._short_item | {"labels": [IGNORE_INDEX] * len(self._short_item["labels"])}
        self.max_length = max_length
        self._check_processor()

    @property
    def blank_tokens(self) -> int:
        """Number of tokens that a blank image adds to a batch of texts."""
        return len(self._blank_item["input_ids"])

    def count_tokens(self, row: dict) -> tuple[int, int]:
        try:
            replacements = self._get_replacements(*self._read_sizes(row))
        except (BadImageError, ValueError) as error:  # some processors reject images with an extreme aspect ratio
            raise InputError(f"row {row['id']}: {error}; replace the image, or delete the row") from None
        item = self._encode(row, replacements)
        return len(item["input_ids"]), len(item["labels"]) - item["labels"].count(IGNORE_INDEX)

    def encode_row(self, row: dict | None) -> dict:
        if row is None:
            return self._blank_item
        return self._build_item(row, list(map(load_image, list_images(row))))

    def encode_text(self, row: dict, *replacements: str) -> dict:
        """Return the tokens of `encode_row`, with the strings that `process_image` returned for the row's images."""
        encoded = self._encode(row, list(replacements))
        type_ids = self.make_type_ids(torch.tensor([encoded["input_ids"]]))
        return encoded | {name: values[0].tolist() for name, values in type_ids.items()}

    def count_image_tokens(self, row: dict) -> int:
        image_token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return sum(replacement.count(image_token) for replacement in self._get_replacements(*self._read_sizes(row)))

    def build_sample(self, *sizes: tuple[int, int]) -> dict:
        """Return the item of a question and a one-letter answer about blank images of `sizes` pixels."""
        return self._build_item(make_sample_row(len(sizes)), [Image.new("RGB", size) for size in sizes])

    def _read_sizes(self, row: dict) -> list[tuple[int, int]]:
        return [self._read_size(image) for image in list_images(row)]

    def _build_item(self, row: dict, images: list[Image.Image]) -> dict:
        replacements = self._get_replacements(*(image.size for image in images))
        item = self._encode(row, replacements)
        output = self._process(row, images)
        processor_ids = output.pop("input_ids")[0].tolist()
        type_ids = {name: output.pop(name)[0].tolist() for name in set(output) & set(TYPE_IDS)}
        if processor_ids[: len(item["input_ids"])] != item["input_ids"]:
            text, _ = self.renderer.insert_replacements(row, replacements)
            if processor_ids != self.tokenizer(text, add_special_tokens=self._adds_bos(text))["input_ids"]:
                raise RuntimeError(f"row {row['id']}: the processor's tokens differ from the tokens that were counted")
            # an answer was tokenized separately
            type_id_tensors = self.make_type_ids(torch.tensor([item["input_ids"]]))
            type_ids = {name: values[0].tolist() for name, values in type_id_tensors.items()}
        return item | {name: values[: len(item["input_ids"])] for name, values in type_ids.items()} | dict(output)

    def batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """Return a right-padded batch without an attention mask, which causal attention does not need.

        If no item has an image, a blank image without loss follows the tokens of the shortest item, which causal
        attention hides from them. The parameters that stage 1 trains must have a gradient in every micro batch, and
        under ZeRO-3 all processes gather the towers' weights together.
        """
        if not any(item.keys() - {"labels", *TOKEN_FIELDS} for item in items):
            shortest = min(range(len(items)), key=lambda number: len(items[number]["input_ids"]))
            joined = self._append_blank_image(items[shortest])
            items = [*items[:shortest], joined, *items[shortest + 1 :]]
            width = max(width, len(joined["input_ids"]))
        image_fields = dict.fromkeys(name for item in items for name in item if name not in TOKEN_FIELDS)
        batch = self.batch_tokens(items, width) | {
            name: concatenate([item[name] for item in items if name in item]) for name in image_fields
        }
        return batch | self.tower_inputs(batch) if self.tower_inputs else batch

    def _append_blank_image(self, item: dict) -> dict:
        """Return a text with a blank image after it, without loss."""
        blank, length = self._blank_item, len(item["input_ids"])
        fields = {
            name: item.get(name, [self.fillers[name]] * length) + blank[name] for name in TOKEN_FIELDS if name in blank
        }
        return {name: values for name, values in blank.items() if name not in TOKEN_FIELDS} | fields

    def batch_tokens(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """Return the token fields of `batch`."""
        fillers = self.fillers | {"input_ids": self.tokenizer.pad_token_id or 0}
        batch = {}
        for name in [name for name in TOKEN_FIELDS if any(name in item for item in items)]:
            rows = [item.get(name, []) for item in items]
            batch[name] = torch.tensor([row + [fillers[name]] * (width - len(row)) for row in rows])
        return batch | {"answer_positions": find_answer_positions(batch["labels"])}

    def _check_processor(self) -> None:
        """Encode a blank image, which fails if the template or the processor cannot be used at all."""
        if self.image_token_id not in self._short_item["input_ids"]:
            raise InputError(f"its processor never writes the image_token_id of config.json, {self.image_token_id}")
        self.batch([self._blank_item], len(self._blank_item["input_ids"]))
        self.encode_prompts([self.process_image(Image.new("RGB", BLANK_IMAGE_SIZE))[1]], ["a"])

    @property
    def stops(self) -> frozenset[int]:
        return frozenset({self.tokenizer.eos_token_id, self.end_of_turn} - {None})

    @property
    def end_of_turn(self) -> int:
        """Token that ends an answer."""
        return next(label for label in reversed(self._short_item["labels"]) if label != IGNORE_INDEX)

    def _find_control_tokens(self) -> tuple[str, ...]:
        """Return the tokenizer's special tokens and the added tokens that the chat template writes."""
        written = self.renderer.render(self.renderer.build_messages(build_conversation("", "", "a", "a")), True)
        control = set(self.special) | {token for token in self.tokenizer.get_added_vocab() if token in written}
        return tuple(sorted(token for token in control - {IMAGE_TOKEN} if token.strip()))

    def process_image(self, image: Image.Image) -> tuple[dict[str, torch.Tensor], str]:
        """Return the model's inputs for an image, and the text that replaces the image in a prompt."""
        try:
            inputs, [replacement] = self._process_images([image], return_tensors="pt")
        except ValueError as error:  # some processors reject images with an extreme aspect ratio
            raise InputError(f"an image of {image.size} pixels cannot be processed: {error}; delete its rows") from None
        return _shorten_mask(
            {n: values for n, values in inputs.items() if isinstance(values, torch.Tensor)}
        ), replacement

    def encode_prompts(self, replacements: list[str | None], questions: list[str]) -> dict[str, torch.Tensor]:
        """Return `tokenize_prompts` padded on the left, with the model's other inputs for tokens."""
        rows = self.tokenize_prompts(replacements, questions)
        ids, mask = pad_left(rows, max(map(len, rows)), self.tokenizer.pad_token_id or 0)
        return {"input_ids": ids, "attention_mask": mask} | self.make_type_ids(ids)

    def tokenize_prompts(self, replacements: list[str | None], questions: list[str]) -> list[list[int]]:
        """Return the tokens of prompts for questions about one image each, up to the answer.

        `replacements` are the texts that `process_image` returned for each question's image; None for a question
        without an image. Their tokens between special tokens, which do not depend on the prompt, are computed once.
        """
        for question in questions:
            if token := find_control_token(question, self.control_tokens):
                raise InputError(f"the question {question!r} contains the control token {token}; remove the token")
        image_token = self.processor.image_token
        parts = [text if text is None else self._split_replacement(text) for text in replacements]
        texts = [
            self._render_prompt(part and part[0] + image_token + part[2], question)
            for part, question in zip(parts, questions, strict=True)
        ]
        rows = self.tokenizer(texts, add_special_tokens=self._adds_bos(texts[0]))["input_ids"]
        for row, part in zip(rows, parts, strict=True):
            if part is not None:
                index = row.index(self.tokenizer.convert_tokens_to_ids(image_token))
                row[index : index + 1] = self._tokenize_replacement(part[1])
        return rows

    def _split_replacement(self, text: str) -> tuple[str, str, str]:
        """Split an image's text into the parts before, between and after special tokens.

        The tokenizer may join the first and the last part with the prompt: Gemma 3's are line breaks.
        """
        tokens = [token for token in {*self.special, self.processor.image_token} if token in text]
        begin = min(text.find(token) for token in tokens)
        end = max(text.rfind(token) + len(token) for token in tokens)
        return text[:begin], text[begin:end], text[end:]

    def has_causal_prompts(self) -> bool:
        """Return whether image tokens do not attend to the question; PaliGemma's do."""
        return self._marks_images.get("token_type_ids", True)

    def make_type_ids(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the model's additional inputs (B, T) for tokens; most models mark image tokens with them."""
        return {
            name: torch.as_tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
            if marks_images
            else torch.zeros_like(ids)
            for name, marks_images in self._marks_images.items()
        }

    def _render_prompt(self, replacement: str | None, question: str) -> str:
        turns = build_conversation("", "", question, "")["conversations"][:1]
        if replacement is None:
            return self.renderer.render(
                self.renderer.build_messages({"conversations": [turns[0] | {"value": question}]}), True
            )
        text = self.renderer.render(self.renderer.build_messages({"conversations": turns}), True)
        return text.replace(self.processor.image_token, replacement, 1)

    def _encode(self, row: dict, replacements: list[str]) -> dict[str, list[int]]:
        """Return token ids, including image tokens, and labels, without reading an image."""
        ids, labels = self._label_tokens(*self.renderer.insert_replacements(row, replacements))
        check_image_fits(row, ids, self.image_token_id, self.max_length)
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def _label_tokens(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, and their labels: `IGNORE_INDEX` except on answers (start, end).

        The tokens before an answer must equal the tokens of its generation prompt. If the tokenizer splits them
        differently because an answer follows, prompt and answer are tokenized separately.
        """
        encoded = self.tokenizer(text, add_special_tokens=self._adds_bos(text), return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        answers = []
        for begin, stop in spans:
            first, prompt = self._find_end_of_prompt(text[:begin], ids[: bisect_left(starts, begin)])
            answer, end = first + len(prompt), bisect_left(starts, stop)
            if ids[first:answer] != prompt:
                separate = prompt + self._tokenize_within(text[begin:stop])
                ids[first:end] = separate
                starts[first:end] = [begin] * len(separate)
                end = first + len(separate)
            answers.append((answer, end))
        labels = [IGNORE_INDEX] * len(ids)
        for begin, end in answers:
            labels[begin:end] = ids[begin:end]
        return ids, labels

    def _find_end_of_prompt(self, prompt: str, ids: list[int]) -> tuple[int, list[int]]:
        """Return the index and the tokens of a prompt's end, from its last special token on, tokenized separately.

        Tokenizers split text at special tokens first, so tokens before the last one do not depend on the text that
        follows the prompt. `ids` are the tokens of the whole text that begin within the prompt.
        """
        position = max((prompt.rfind(token) for token in self.special), default=-1)
        if position < 0:
            return 0, self.tokenizer(prompt, add_special_tokens=self._adds_bos(prompt))["input_ids"]
        special_ids = set(self.special.values())
        start = next(index for index in reversed(range(len(ids))) if ids[index] in special_ids)
        return start, self._tokenize_from_special(prompt[position:])

    def _tokenize_alone(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokenize_within(self, text: str) -> list[int]:
        """Return the tokens of a text as they are inside a longer text, without a prefix for the first word."""
        lead, ids = self._tokenize_alone(LINE_BREAK), self._tokenize_alone(LINE_BREAK + text)
        if ids[: len(lead)] != lead:
            raise InputError(
                f"its tokenizer joins the answer {text[:40]!r} with the text before it; use a chat template that "
                "writes a line break before an answer"
            )
        return ids[len(lead) :]

    def _process(self, row: dict, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """Return all outputs of the processor for the row except the attention mask."""
        text, _ = self.renderer.render_answers(row)
        output = self.processor(
            text=[text],
            images=[images] if images else None,
            add_special_tokens=self._adds_bos(text),
            return_tensors="pt",
        )
        return _shorten_mask({name: values for name, values in output.items() if name != "attention_mask"})

    def _adds_bos(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _make_replacements(self, *sizes: tuple[int, int]) -> list[str]:
        """Return the text that replaces each image of a conversation; sizes are (width, height)."""
        if not sizes:
            return []
        return self._process_images([Image.new("RGB", size) for size in sizes])[1]

    def _process_images(self, images: list[Image.Image], **more) -> tuple[dict, list[str]]:
        """Return the model's inputs for the images of one conversation, and the text that replaces each image."""
        kwargs = self.processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]
        return self.processor._process_images([images], **kwargs | more)


class PrefixEncoder(ProcessorEncoder):
    """Encoder for processors without a chat template (PaliGemma): of one image, one question and one answer.

    The question is a prefix whose tokens all attend to each other. The answer is its suffix (Beyer et al., PaliGemma,
    2024, section 3.2).
    """

    fillers = ProcessorEncoder.fillers | {"token_type_ids": SUFFIX}  # the prefix must not attend to padding
    reads_text_alone = False

    def encode_text(self, row: dict, replacement: str) -> dict:
        item = super().encode_text(row, replacement)
        return item | {"token_type_ids": [PREFIX if label == IGNORE_INDEX else SUFFIX for label in item["labels"]]}

    def _encode(self, row: dict, replacements: list[str]) -> dict[str, list[int]]:
        question, answer = self._split_turns(row)
        if len(replacements) != 1:
            raise InputError(f"row {row['id']}: this model takes one image, found {len(replacements)}; delete the row")
        prefix = self._render_prompt(replacements[0], question)
        suffix = answer + self.tokenizer.eos_token
        encoded = self.tokenizer(prefix, text_pair=suffix, return_token_type_ids=True)
        check_image_fits(row, encoded["input_ids"], self.image_token_id, self.max_length)
        ids, type_ids = encoded["input_ids"][: self.max_length], encoded["token_type_ids"][: self.max_length]
        labels = [token if type_id == SUFFIX else IGNORE_INDEX for token, type_id in zip(ids, type_ids, strict=True)]
        return {"input_ids": ids, "labels": labels}

    def _process(self, row: dict, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        question, answer = self._split_turns(row)
        output = self.processor(
            text=[self.processor.image_token + question], suffix=[answer], images=[images], return_tensors="pt"
        )
        return {name: values for name, values in output.items() if name not in ("attention_mask", "labels")}

    def _render_prompt(self, replacement: str, question: str) -> str:
        return f"{replacement}{self.tokenizer.bos_token}{question.strip()}\n"

    def _find_control_tokens(self) -> tuple[str, ...]:
        return tuple(sorted(token for token in set(self.special) - {IMAGE_TOKEN} if token.strip()))

    def _split_turns(self, row: dict) -> tuple[str, str]:
        if len(row["conversations"]) != 2:
            raise InputError(f"row {row['id']}: this model takes one question and one answer; divide the conversation")
        return tuple(turn["value"].replace(IMAGE_TOKEN, " ").strip() for turn in row["conversations"])


def _shorten_mask(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values.bool() if name == PIXEL_MASK else values for name, values in inputs.items()}


def make_sample_row(images: int) -> dict:
    """Return a row with a one-letter question about `images` images and a one-letter answer."""
    row = build_conversation("", "", "a", "a")
    row["conversations"][0]["value"] = IMAGE_TOKEN * images + "a"
    return row


def concatenate(values: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension; pad the second, an image's tiles, to the largest one."""
    if values[0].dim() > 2:
        greatest = max(value.shape[1] for value in values)
        values = [
            v if v.shape[1] == greatest else pad(v, (0, 0) * (v.dim() - 2) + (0, greatest - v.shape[1])) for v in values
        ]
    return torch.cat(values)
