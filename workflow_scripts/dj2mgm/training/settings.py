"""The resolved settings of a training stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dj2mgm.config.training import AUTO, solve_batch
from dj2mgm.files import read_yaml
from dj2mgm.mgm.lora import LoraSettings


@dataclass(frozen=True)
class ScoreSettings:
    questions: int  # at each checkpoint, at most
    share: float  # of training's time, at most: fewer are asked instead


@dataclass(frozen=True)
class TrainingSettings:
    """One training stage. Batch sizes count samples.

    `deepspeed` is the content of a config/deepspeed file; None, if the memory plan is to choose one of
    `deepspeed_choices`. The plan also decides what is "auto" (training/memory_plan.py).
    """

    seed: int
    gpus: int
    cpu_threads: int | None
    template: str | dict  # a chat format's name, or its content (config/chat_templates.py)
    global_batch_size: int
    micro_batch_size: int | str  # at the greatest length; shorter samples take as many tokens
    gradient_accumulation_steps: int | str
    epochs: float
    max_steps: int | None  # optimizer steps; None: as many as the epochs take
    learning_rate: float
    lr_scheduler: str
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float
    max_length: int
    precision: str  # bf16, fp32, fp8 or nf4 (of frozen layers, the rest as in auto), auto: bf16 on a GPU, fp32 on a CPU
    activation_checkpointing: bool | int | str  # every layer, or every n-th
    attn_implementation: str  # of the language model: flash_attention_2, sdpa, or auto
    compile: bool  # on a GPU; never on a CPU
    save_steps: int
    log_steps: int
    loader_workers: int
    check_memory: bool  # refuse what the memory plan says cannot fit
    deepspeed: dict | None
    deepspeed_choices: dict[str, dict] | None = None  # contents by name
    lora: LoraSettings | None = None
    score_while_training: ScoreSettings | None = None  # at each checkpoint
    projector_learning_rate: float | None = None  # of projector and patch info mining; None: learning_rate
    trackers: Sequence[str] = ("tensorboard",)  # that show the training
    labels: Mapping[str, str | int] = field(default_factory=dict)  # what they are told: experiment, dataset, recipe
    nodes: int = 1  # that the GPUs are on

    def __post_init__(self):
        solve_batch("config.yaml", vars(self))

    @property
    def has_auto(self) -> bool:
        """Whether something is left for the memory plan to decide."""
        return bool(self.deepspeed_choices) or AUTO in (self.micro_batch_size, self.activation_checkpointing)

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16" or (self.precision != "fp32" and torch.cuda.is_available())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights while they are trained."""
        return torch.bfloat16 if self.bf16 else torch.float32


def load_training_settings(path: str | Path) -> TrainingSettings:
    return training_settings(read_yaml(path))


def training_settings(values: dict) -> TrainingSettings:
    lora, score = values.get("lora"), values.get("score_while_training")
    made = {
        "lora": LoraSettings(**lora) if lora else None,
        "score_while_training": ScoreSettings(**score) if score else None,
    }
    return TrainingSettings(**values | made)
