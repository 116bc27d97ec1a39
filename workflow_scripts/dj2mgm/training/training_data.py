"""Training data: conversations with images, or texts."""

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
    """Conversations of jsonl files, one per line, with absolute image paths, read and decoded on access.

    Items are the encoder's; item None carries no loss.

    Attributes:
        lengths: (N,) tokens of each conversation.
        answers: (N,) tokens of each conversation that carry loss.
        largest_images: images of the conversation whose images have the most pixels.
    """

    def __init__(self, paths: str | Path | Sequence[Path], encoder: Encoder):
        self.encoder = encoder
        self.lengths, self.answers = array("i"), array("i")
        self.largest_images: list[str] = []
        paths = [paths] if isinstance(paths, str | Path) else paths
        most_pixels = -1
        for path in paths:
            most_pixels = self._measure(path, most_pixels)
        if not self.lengths:
            raise InputError(f"{' and '.join(map(str, paths))}: there are no conversations to train on")
        if not any(self.answers):
            raise InputError(
                f"{' and '.join(map(str, paths))}: no token of any answer lies within max_length; raise max_length, or "
                "shorten the questions"
            )
        self.files = [LineIndex(path) for path in paths]

    def _measure(self, path: str | Path, most_pixels: int) -> int:
        """Check and measure all rows of a file; return the pixels of the largest images so far."""
        for number, row in enumerate(read_llava(path), start=1):  # rows are not kept in memory
            if problem := image_problem(row) or control_problem(row, self.encoder.control_tokens):
                raise InputError(f"{path}, row {number}: {problem}; fix or delete the row")
            length, answered = self.encoder.tokens(row)
            if (images := list_images(row)) and (pixels := self.encoder.pixels(row)) > most_pixels:
                self.largest_images, most_pixels = images, pixels
            self.lengths.append(length)
            self.answers.append(answered)
        return most_pixels

    def truncation_note(self, max_length: int) -> str | None:
        """Return a note about conversations that are truncated at `max_length` tokens; None if there are none."""
        whole = sum(length < max_length for length in self.lengths)
        if whole == len(self):
            return None
        return (
            f"{len(self) - whole} of {len(self)} conversations have at least max_length ({max_length}) tokens and are "
            f"truncated; {self.answers.count(0)} of all have no token of an answer left to learn"
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
    """Collator of items to the encoder's batch, padded to one of few widths (training/batches.py).

    Args:
        encoder: makes the batch.
        longest: tokens of the longest conversation.
    """

    def __init__(self, encoder: Encoder, longest: int):
        self.encoder = encoder
        self.longest = longest

    def __call__(self, items: list[dict]) -> dict[str, torch.Tensor]:
        longest_item = max(len(item["input_ids"]) for item in items)
        return self.encoder.batch(items, padded_width(longest_item, self.longest))


class TextDataset(Dataset):
    """Texts for a causal language model, joined and cut into samples of one length.

    Items are {input_ids, labels}, both (length,) int64 and equal, because the model shifts its labels itself. Item None
    carries no loss.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, length: int):
        tokens: list[int] = []
        for text in read_texts(path):
            tokens += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        count = len(tokens) // length
        if not count:
            raise InputError(f"{path}: the file has {len(tokens)} tokens, fewer than max_length, {length}; lower it")
        self.samples = torch.tensor(tokens[: count * length]).view(count, length)
        self.lengths = [length] * count

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        if index is None:
            return {"input_ids": self.samples[0], "labels": torch.full_like(self.samples[0], IGNORED)}
        return {"input_ids": self.samples[index], "labels": self.samples[index]}
