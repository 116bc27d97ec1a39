"""Texts to train a language model on: jsonl with one {"text": …} per line."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dj2mgm.errors import InputError
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.storage.streaming import read_objects


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a corpus."""
    for number, row in read_objects(path):
        text = row.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}, line {number}: expected a non-empty `text`")
        yield text


class TextDataset(Dataset):
    """Texts for a causal language model, joined and cut into samples of one length.

    Items are {input_ids, labels}, both (length,) int64 and equal, because the model shifts its labels itself. Item None
    carries no loss. `lengths` and `answers` are (N,) tokens of each sample, and those of them that carry loss.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, length: int):
        tokens: list[int] = []
        for text in read_texts(path):
            tokens += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        count = len(tokens) // length
        if not count:
            raise InputError(f"{path}: the file has {len(tokens)} tokens, fewer than max_length, {length}; lower it")
        self.samples = torch.tensor(tokens[: count * length]).view(count, length)
        self.lengths, self.answers = [length] * count, [length - 1] * count

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        if index is None:
            return {"input_ids": self.samples[0], "labels": torch.full_like(self.samples[0], IGNORE_INDEX)}
        return {"input_ids": self.samples[index], "labels": self.samples[index]}
