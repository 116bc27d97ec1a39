"""Resolved settings of a training stage."""

from pathlib import Path
from typing import Self

import torch
from pydantic import model_validator

from dj2mgm.config.settings.base import setting
from dj2mgm.config.settings.training_stages import FinetuneSection, LoraSettings, ScoreSettings
from dj2mgm.config.settings.validation import validated
from dj2mgm.config.training import AUTO, solve_batch
from dj2mgm.files import read_yaml


class TrainingSettings(FinetuneSection):
    """Settings of `pretrain` or `finetune`, and settings of the run. Batch sizes count samples.

    Stage 1 and text models have no `lora` and no `projector_learning_rate`. The memory plan chooses the values of
    "auto" settings (training/memory_plan.py).
    """

    seed: int
    gpus: int = setting(..., retrains=False)
    nodes: int = setting(1, "nodes of the GPUs", retrains=False)
    cpu_threads: int | None = setting(..., retrains=False)
    template: str | dict = setting(..., "name of a chat format, or its content (config/chat_templates.py)")
    deepspeed: dict | None = setting(..., "content of a file; null: the plan chooses one of deepspeed_choices")
    deepspeed_choices: dict[str, dict] | None = setting(None, "contents by name")
    lora: LoraSettings | None = setting(None)
    score_while_training: ScoreSettings | None = setting(None, retrains=False)
    trackers: list[str] = setting(["tensorboard"], retrains=False)
    labels: dict[str, str | int] = setting({}, "experiment, dataset and so on, for trackers", retrains=False)

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        solve_batch("config.yaml", vars(self))
        return self

    @property
    def has_auto(self) -> bool:
        """True if a setting is left to the memory plan."""
        return bool(self.deepspeed_choices) or AUTO in (self.micro_batch_size, self.activation_checkpointing)

    @property
    def bf16(self) -> bool:
        """True if training computes in bfloat16."""
        return self.precision == "bf16" or (self.precision != "fp32" and torch.cuda.is_available())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights during training."""
        return torch.bfloat16 if self.bf16 else torch.float32


def load_training_settings(path: str | Path) -> TrainingSettings:
    """Read the config.yaml of a training stage."""
    return validated(TrainingSettings, read_yaml(path), str(path))
