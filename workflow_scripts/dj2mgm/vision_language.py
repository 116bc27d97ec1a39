"""What training and answering ask of a vision-language model, whichever it is: MGM (mgm/family.py) is one.

Batches go from a model's encoder to its forward pass as they are. Of what is in them, only `input_ids`, `labels` and
`answer_positions` are anybody else's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

from dj2mgm.questions import Answerer

IGNORED = -100  # label of tokens that carry no loss


class Encoder(Protocol):
    """Conversations → tensors, in one chat format."""

    control_tokens: tuple[str, ...]  # which no text may contain

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def tokens(self, row: dict) -> tuple[int, int]:
        """Tokens of a conversation, its images' included, and how many of them carry loss.

        Raises:
            InputError: the row cannot be trained on.
        """

    def pixels(self, row: dict) -> int:
        """Of its images, as far as these decide how much memory it takes."""

    def item(self, row: dict | None) -> dict:
        """`input_ids` and `labels`, equal in length, and whatever else the model reads. None: carries no loss."""

    def batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """Right-padded: input_ids and labels (B, width), answer_positions (n,), and the rest as the model reads it."""


@dataclass(frozen=True)
class Parts:
    """Of a loaded model, whatever wraps it.

    Attributes:
        towers: layers of what sees, in the order in which they run, without gradients.
        between: modules of the towers beside these layers that are worth compiling.
        decoder: layers of the language model.
        head: hidden states → logits, or their loss (mgm/loss.py).
        called: modules whose parameters are read outside of their own submodules' forward passes.
        fresh: what stage 1 begins with new weights for, from the run's seed.
    """

    towers: Sequence[nn.Module]
    between: Sequence[nn.Module]
    decoder: nn.ModuleList
    head: nn.Module
    called: Sequence[nn.Module]
    fresh: Sequence[nn.Module]


class Family(Protocol):
    """A model in a folder."""

    config: PretrainedConfig
    processor: ProcessorMixin

    def encoder(self, template: str | dict, max_length: int) -> Encoder:
        """
        Args:
            template: a chat format's name, or its content (config/chat_templates.py).
            max_length: tokens after which a conversation is cut.
        """

    def load(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """The model with its weights; `attention` is transformers' name of the language model's implementation."""

    def inputs(self, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """A batch as the forward pass takes it; a GPU is not waited for."""

    def parts(self, model: nn.Module) -> Parts: ...

    def trained(self, stage: Path | None, dtype: torch.dtype | str) -> PreTrainedModel:
        """The whole model with what a stage has trained, an adapter merged; None: as it is.

        Raises:
            InputError: the stage's folder is not what it should be, or a file in it is damaged.
        """

    def save_processor(self, folder: Path) -> None:
        """Into a folder that holds the model, or will."""

    def generator(self, stage: Path | None, device: str | torch.device | None) -> Answerer:
        """The same, to answer: in bf16 on a GPU, in float32 elsewhere. None: the GPU if there is one."""
