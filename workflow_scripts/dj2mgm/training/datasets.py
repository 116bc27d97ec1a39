"""What is trained on: conversations with images, or text."""

from array import array
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dj2mgm.data.formats import control_problem, image_problem, read_llava, read_texts
from dj2mgm.data.images import load_image
from dj2mgm.data.prompts import ChatTemplate
from dj2mgm.data.rows import LineIndex
from dj2mgm.errors import InputError
from dj2mgm.mgm import MGMProcessor
from dj2mgm.mgm.modeling_mgm import IGNORED, positions_of_answers, positions_of_images
from dj2mgm.training.batches import padded_width


class ConversationDataset(Dataset):
    """One conversation a line, with an absolute image path, read and decoded when its turn comes.

    Items are {input_ids, labels, pixel_values or None}; conversations are cut after `max_length` tokens. Item None has
    no image and carries no loss. `lengths` (N,) are the tokens of each conversation, `answers` (N,) those that carry
    loss.

    Pixels are bytes, a quarter of what the model is given: normalised, images of a few steps would take gigabytes, and
    their way to a GPU longer.
    """

    def __init__(self, path: str | Path, processor: MGMProcessor, template: str | dict, max_length: int):
        if max_length <= processor.num_image_tokens:
            raise InputError(
                f"max_length {max_length} leaves no room beside an image's "
                f"{processor.num_image_tokens} tokens; raise it"
            )
        self.template = ChatTemplate.of(template, processor.tokenizer)
        self.processor = processor
        self.max_length = max_length
        self.lengths, self.answers = array("i"), array("i")
        for number, row in enumerate(read_llava(path), start=1):  # all are looked at now, none is kept
            if problem := image_problem(row) or control_problem(row, self.template.control_tokens):
                raise InputError(f"{path}, row {number}: {problem}; fix or delete the row")
            labels = self._encode(row)["labels"]
            self.lengths.append(len(labels))
            self.answers.append(len(labels) - labels.count(IGNORED))
        if not self.lengths:
            raise InputError(f"{path} holds no conversations; nothing to train on")
        self.rows = LineIndex(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | None) -> dict:
        if index is None:
            return {"input_ids": [self.processor.tokenizer.pad_token_id], "labels": [IGNORED], "pixel_values": None}
        row = self.rows[index]
        item = self._encode(row) | {"pixel_values": None}
        if "image" in row:
            item["pixel_values"] = self.processor.resized([load_image(row["image"])])[0]
        return item

    def _encode(self, row: dict) -> dict[str, list[int]]:
        segments = self.template.segments(row["conversations"])
        item = {key: ids[: self.max_length] for key, ids in self.processor.encode(segments).items()}
        placeholders = item["input_ids"].count(self.processor.image_token_id)
        if "image" in row and placeholders < self.processor.num_image_tokens:
            raise InputError(f"row {row['id']}: its image lies beyond max_length {self.max_length}; raise it")
        return item


class Collator:
    """Right-pads a batch: input_ids and labels (B, T), pixel_values (images, 3, S', S') uint8, and where both stand.

    T is one of few widths up to `longest`, the tokens of the longest conversation (training/batches.py).

    There is no attention mask: under causal attention nothing looks at what stands to its right, padding carries no
    loss, and attention without a mask is what the fast kernels compute.
    """

    def __init__(self, pad_token_id: int, image_token_id: int, longest: int):
        self.pad_token_id = pad_token_id
        self.image_token_id = image_token_id
        self.longest = longest

    def __call__(self, items: list[dict]) -> dict[str, torch.Tensor]:
        width = padded_width(max(len(item["input_ids"]) for item in items), self.longest)
        input_ids = torch.full((len(items), width), self.pad_token_id)
        labels = torch.full((len(items), width), IGNORED)
        for row, item in enumerate(items):
            length = len(item["input_ids"])
            input_ids[row, :length] = torch.tensor(item["input_ids"])
            labels[row, :length] = torch.tensor(item["labels"])
        # counted here, where nothing has to wait for a GPU
        batch = {"input_ids": input_ids, "labels": labels, "answer_positions": positions_of_answers(labels)}
        images = [item["pixel_values"] for item in items if item["pixel_values"] is not None]
        if images:
            batch["pixel_values"] = torch.stack(images)
            batch["image_positions"] = positions_of_images(input_ids, self.image_token_id)
        return batch


class TextDataset(Dataset):
    """Texts to train a causal language model on: joined, and cut into samples of one length.

    Items are {input_ids, labels}, both (length,) int64 and equal; the model shifts its labels itself. Item None carries
    no loss.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, length: int):
        tokens: list[int] = []
        for text in read_texts(path):
            tokens += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        count = len(tokens) // length
        if not count:
            raise InputError(f"{path} holds {len(tokens)} tokens, fewer than a max_length of {length}; lower it")
        self.samples = torch.tensor(tokens[: count * length]).view(count, length)
        self.lengths = [length] * count

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        if index is None:
            return {"input_ids": self.samples[0], "labels": torch.full_like(self.samples[0], IGNORED)}
        return {"input_ids": self.samples[index], "labels": self.samples[index]}
