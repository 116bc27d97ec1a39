"""What is trained on: conversations with images, or text."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dj2mgm.data.formats import control_problem, image_problem, list_images, read_llava, read_texts
from dj2mgm.data.rows import LineIndex
from dj2mgm.errors import InputError
from dj2mgm.training.batches import padded_width
from dj2mgm.vision_language import IGNORED, Encoder


class ConversationDataset(Dataset):
    """One conversation a line, in one file after another, with an absolute image path, read and decoded when its turn
    comes.

    Items are the encoder's; item None carries no loss. `lengths` (N,) are the tokens of each conversation, `answers`
    (N,) those that carry loss. `largest_images` are those of the one whose images have the most pixels.
    """

    def __init__(self, paths: str | Path | Sequence[Path], encoder: Encoder):
        self.encoder = encoder
        self.lengths, self.answers = array("i"), array("i")
        self.largest_images: list[str] = []
        paths = [paths] if isinstance(paths, str | Path) else paths
        most_pixels = -1
        for path in paths:
            most_pixels = self._look_at(path, most_pixels)
        if not self.lengths:
            raise InputError(f"{' and '.join(map(str, paths))} holds no conversations; nothing to train on")
        if not any(self.answers):
            raise InputError(
                f"{' and '.join(map(str, paths))}: there is no token of any answer to learn within max_length; raise "
                "max_length, or shorten what is asked"
            )
        self.files = [LineIndex(path) for path in paths]

    def _look_at(self, path: str | Path, most_pixels: int) -> int:
        """Returns the pixels of the largest images so far."""
        for number, row in enumerate(read_llava(path), start=1):  # all are looked at now, none is kept
            if problem := image_problem(row) or control_problem(row, self.encoder.control_tokens):
                raise InputError(f"{path}, row {number}: {problem}; fix or delete the row")
            length, answered = self.encoder.tokens(row)
            if (images := list_images(row)) and (pixels := self.encoder.pixels(row)) > most_pixels:
                self.largest_images, most_pixels = images, pixels
            self.lengths.append(length)
            self.answers.append(answered)
        return most_pixels

    def cuts(self, max_length: int) -> str | None:
        """A sentence on conversations that end at `max_length` tokens; None if there are none."""
        whole = sum(length < max_length for length in self.lengths)
        if whole == len(self):
            return None
        return (
            f"{len(self) - whole} of {len(self)} conversations have max_length, {max_length} tokens, or more, and end "
            f"there; {self.answers.count(0)} have no token of an answer left to learn"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | None) -> dict:
        return self.encoder.item(None if index is None else self._row(index))

    def _row(self, index: int) -> dict:
        for rows in self.files:
            if index < len(rows):
                return rows[index]
            index -= len(rows)
        raise IndexError


class Collator:
    """Items → the encoder's batch, of one of few widths up to `longest`, the tokens of the longest conversation
    (training/batches.py)."""

    def __init__(self, encoder: Encoder, longest: int):
        self.encoder = encoder
        self.longest = longest

    def __call__(self, items: list[dict]) -> dict[str, torch.Tensor]:
        longest_item = max(len(item["input_ids"]) for item in items)
        return self.encoder.batch(items, padded_width(longest_item, self.longest))


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
