"""Settings of both training stages."""

import os
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dj2mgm.errors import InputError
from dj2mgm.settings.base import Number, SearchInterval, Section, StageSettings, Template, UniqueItems, section, setting
from dj2mgm.settings.batch_sizes import count_micro_batches, solve_batch
from dj2mgm.settings.string_formats import Name

FLASH_ATTENTION = "flash_attention_2"  # value of `attn_implementation`
Steps = Annotated[int, Field(ge=1, le=10**9)]
GlobalBatch = Annotated[int, Field(ge=1, le=2**20)]
LearningRate = Annotated[Number, Field(gt=0)]
Precision = Literal["auto", "bf16", "fp8", "nf4", "fp32"]
MIN_WORKERS, MAX_WORKERS = 4, 8


def is_bf16(precision: Precision, on_gpu: bool) -> bool:
    """Return whether training computes in bfloat16; otherwise it computes in float32."""
    return precision == "bf16" or (precision != "fp32" and on_gpu)


LoraTargets = Annotated[list[str], UniqueItems(), Field(min_length=1)] | Literal["all"]


class LoraSettings(Section):
    """Low-rank adapters of the language model's projections."""

    r: int = setting(16, "rank", ge=1, le=65536, search=SearchInterval(4, 64, log=True))
    alpha: int = setting(32, "scale: alpha / r multiplies the update", ge=1, le=2**20)
    dropout: Number = setting(0.1, "probability of dropout", ge=0, lt=1, search=SearchInterval(0, 0.2))
    targets: LoraTargets = setting(
        ["q_proj", "v_proj", "o_proj"],
        "projections, as transformers names them; all: every linear layer of the language model",
    )


class TrainingSection(Section):
    """Keys of both training stages. Batch sizes count samples."""

    global_batch_size: GlobalBatch | None = setting(
        256, "samples of a step: micro_batch_size × gradient_accumulation_steps × gpus; one of the four may be null"
    )
    micro_batch_size: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] | None = setting(
        "auto",
        "samples of the data's greatest length in a micro batch; of shorter samples up to twice as many, with at most "
        "the same number of tokens",
        retrains=False,
    )
    gradient_accumulation_steps: GlobalBatch | Literal["auto"] | None = setting(
        "auto", "micro batches of a step", retrains=False
    )
    epochs: Number = setting(1, "passes over the data", gt=0, le=100_000)
    max_steps: Steps | None = setting(
        None, "optimizer steps, which replace epochs; null: the number that the epochs need"
    )
    min_steps: int = setting(
        30, "with less data, epochs are added until this number of steps; 0: none are added", ge=0, le=10**9
    )
    learning_rate: LearningRate = setting(1.0e-3, "peak of the schedule", search=SearchInterval(1e-5, 1e-2, log=True))
    lr_scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = setting(
        "cosine", "schedule of the learning rate after the warmup"
    )
    warmup_ratio: Number = setting(
        0.03, "share of all steps in which the learning rate rises", ge=0, lt=1, search=SearchInterval(0, 0.1)
    )
    weight_decay: Number = setting(0.0, "not applied to norms and biases", ge=0, search=SearchInterval(0, 0.1))
    max_grad_norm: Number = setting(1.0, "gradients are scaled down to this norm", gt=0)
    max_length: int = setting(2048, "tokens, image included; longer conversations are cut", ge=1, le=2**24)
    precision: Precision = setting("auto", "auto: bf16 on a GPU, fp32 on a CPU; fp8, nf4: frozen layers in 8 or 4 bits")
    activation_checkpointing: bool | Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = setting(
        "auto",
        "recompute activations in the backward pass, which saves memory; n: of every n-th layer only",
        retrains=False,
    )
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa"] = setting(
        "auto", "auto: FlashAttention if flash-attn is installed, else PyTorch's sdpa"
    )
    compile: bool = setting(True, "torch.compile on a GPU: a minute once, then faster; no effect on a CPU")
    deepspeed: Name = setting("auto", "file config/deepspeed/<name>.json")
    check_memory: bool = setting(
        True, "refuse to start if training cannot fit the GPU or the host; false: try anyway", retrains=False
    )
    save_steps: Steps = setting(20, "steps from one resume checkpoint to the next", retrains=False)
    log_steps: Steps = setting(1, "steps from one line of metrics to the next", retrains=False)
    loader_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = setting(
        "auto",
        "processes of a GPU that decode images; auto: half of its share of the cores, "
        f"at least {MIN_WORKERS}, at most {MAX_WORKERS}",
        retrains=False,
    )


class PretrainSection(TrainingSection):
    """Stage 1."""


class TuningSection(TrainingSection):
    """Keys of a training that may train the language model, too."""

    global_batch_size: GlobalBatch | None = setting(128, "as in pretrain")
    learning_rate: LearningRate = setting(2.0e-4, "peak of the schedule", search=SearchInterval(1e-5, 1e-3, log=True))
    projector_learning_rate: LearningRate | None = setting(
        None, "learning rate of projector and patch info mining; null: learning_rate. LLaVA uses 2.0e-5 with LoRA"
    )
    lora: LoraSettings | None = section(LoraSettings, "null: full fine-tuning of the language model")


class FinetuneSection(TuningSection):
    """Stage 2."""


class ScoreSettings(Section):
    """Questions to the model at each checkpoint."""

    questions: int = setting(300, "maximum number, always the same ones; 0: none", ge=0, le=10**9)
    share: Number = setting(
        0.03,
        "computation of the scores, relative to training's, which limits the number of questions: a question is one "
        "forward pass, a training sample three",
        gt=0,
        le=100,
    )


class TrainingRunSettings(StageSettings):
    """Values of the run that precede the keys of a training stage."""

    seed: int = setting()
    cpu_threads: int | None = setting(..., retrains=False)
    gpus: int = setting(..., retrains=False)
    nodes: int = setting(1, "nodes of the GPUs", retrains=False)


class TrainingStageSettings(TuningSection, TrainingRunSettings):
    """Settings of `pretrain` or `finetune`. Batch sizes count samples.

    Stage 1 and text models have no `lora` and no `projector_learning_rate`. The memory plan chooses the values of
    "auto" settings (training/memory_plan.py).
    """

    deepspeed: dict | None = setting(..., "content of a file; null: the plan chooses one of deepspeed_choices")
    lora: LoraSettings | None = setting(None)
    trackers: list[str] = setting(["tensorboard"], retrains=False)
    score_while_training: ScoreSettings | None = setting(None, retrains=False)
    deepspeed_choices: dict[str, dict] | None = setting(None, "contents by name")
    template: Template = setting()
    labels: dict[str, str | int] = setting({}, "experiment, dataset and so on, for trackers", retrains=False)

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        micro, accumulation = self.micro_batch_size, self.gradient_accumulation_steps
        # if the plan chose the size, the last micro batch of a step may have fewer samples
        if isinstance(micro, str) or accumulation != self.count_micro_batches(micro):
            solve_batch("config.yaml", vars(self))
        return self

    @property
    def workers(self) -> int:
        """Number of processes of each GPU that decode images on this machine."""
        if self.loader_workers != "auto":
            return self.loader_workers
        cores = len(os.sched_getaffinity(0)) // max(1, self.gpus // self.nodes)
        return min(MAX_WORKERS, max(MIN_WORKERS, cores // 2))

    def count_micro_batches(self, micro_batch: int) -> int | None:
        """Return the micro batches of this size in a step of one GPU; None if the global batch is not stated."""
        if self.global_batch_size is None:
            return None
        return count_micro_batches(self.global_batch_size, micro_batch, self.gpus)


def refuse_unknown_targets(
    targets: Iterable[str], projections: tuple[str, ...], key: str = "finetune.lora.targets"
) -> None:
    """Raise InputError if a LoRA target, which the setting or flag `key` names, is not a projection of the model."""
    for target in targets:
        if target not in projections:
            raise InputError(
                f"{key}: the language model has no projection {target!r}; known are {', '.join(projections)}"
            )
