"""Text to train a causal language model on: joined, and cut into samples of one length."""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from errors import InputError
from formats.texts import read_texts
from mgm.positions import IGNORED


class TextDataset(Dataset):
    """Items are {input_ids, labels}, both (length,) int64 and equal; the model shifts its labels itself. Item
    None carries no loss."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, length: int):
        tokens: list[int] = []
        for text in read_texts(path):
            tokens += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        count = len(tokens) // length
        if not count:
            raise InputError(f"{path} holds {len(tokens)} tokens, fewer than a max_length of {length}; lower it")
        self.samples = torch.tensor(tokens[: count * length]).view(count, length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        if index is None:
            return {"input_ids": self.samples[0], "labels": torch.full_like(self.samples[0], IGNORED)}
        return {"input_ids": self.samples[index], "labels": self.samples[index]}
