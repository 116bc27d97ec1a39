"""Resolved settings of a training stage, with properties that depend on PyTorch and this machine."""

from typing import Self

import torch

from dj2mgm.settings.training_stages import AUTO, TrainingStageSettings, count_steps, find_steps, is_bf16


class TrainingSettings(TrainingStageSettings):
    """Settings of a training stage on this machine."""

    @property
    def has_auto(self) -> bool:
        """True if a setting is left to the memory plan."""
        return bool(self.deepspeed_choices) or AUTO in (self.micro_batch_size, self.activation_checkpointing)

    @property
    def bf16(self) -> bool:
        """True if training computes in bfloat16."""
        return is_bf16(self.precision, torch.cuda.is_available())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights during training."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def with_enough_steps(self, rows: int) -> Self:
        """Return settings that train a number of rows for the steps of `find_steps`."""
        steps = find_steps(self, rows)
        return self if steps == count_steps(self, rows) else self.model_copy(update={"max_steps": steps})
