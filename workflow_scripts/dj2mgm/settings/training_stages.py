"""Settings of both training stages: batches and steps, precisions of frozen layers, sections, DeepSpeed's files."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dj2mgm.errors import InputError, pluralize, quote_value
from dj2mgm.settings.base import Number, SearchInterval, Section, StageSettings, Template, UniqueItems, section, setting
from dj2mgm.settings.config_files import (
    list_config_names,
    locate_config_file,
    read_json_config,
    suggest_name,
)
from dj2mgm.settings.string_formats import Name

FACTORS = ("micro_batch_size", "gradient_accumulation_steps", "gpus")  # their product is global_batch_size
AUTO = "auto"  # the memory plan decides
HARMLESS_PASSES = 4  # over the same rows, which teach a language model nearly as much as new rows (arXiv:2305.16264)


def solve_batch(location: str, settings: Mapping, alternative: str = "") -> dict[str, int | str]:
    """Return `global_batch_size`, in samples per step, and its three factors, with the null one computed.

    If the micro batch is "auto" and the accumulation is "auto" or null, both are "auto": the memory plan chooses them.

    Args:
        location: beginning of the message.
        settings: values with the four keys.
        alternative: another remedy for sizes whose product is wrong, as in "set a: 1".

    Raises:
        InputError: more than one is null, or the product is wrong; the message names sizes that are possible.
    """
    sizes = {key: settings[key] for key in ("global_batch_size", *FACTORS)}
    planned_sizes = {"micro_batch_size": AUTO, "gradient_accumulation_steps": AUTO}
    if sizes["micro_batch_size"] == AUTO and sizes["gradient_accumulation_steps"] in (AUTO, None):
        if sizes["global_batch_size"] is None:
            raise InputError(f"{location}: global_batch_size is null while micro_batch_size is auto; set one of them")
        return (
            solve_batch(location, sizes | {"micro_batch_size": 1, "gradient_accumulation_steps": None}) | planned_sizes
        )
    sizes = {key: None if size == AUTO else size for key, size in sizes.items()}
    open_keys = [key for key, size in sizes.items() if size is None]
    if len(open_keys) > 1:
        raise InputError(f"{location}: {' and '.join(open_keys)} are null; set all but one")
    if open_keys == ["global_batch_size"]:
        return sizes | {"global_batch_size": _multiply(sizes, FACTORS)}
    [key] = open_keys or ["gradient_accumulation_steps"]
    other_factors = [factor for factor in FACTORS if factor != key]
    unit, batch_size = _multiply(sizes, other_factors), sizes["global_batch_size"]
    solved_sizes = sizes | {key: batch_size // unit}
    if batch_size % unit == 0 and (open_keys or solved_sizes == sizes):
        return solved_sizes
    if batch_size % unit == 0:
        remedy = f"set {key}: {solved_sizes[key]}"
    elif not open_keys:
        remedy = f"set global_batch_size: {_multiply(sizes, FACTORS)}" + (f", or {alternative}" if alternative else "")
    else:
        nearest = sorted({max(1, batch_size // unit) * unit, (batch_size // unit + 1) * unit})
        factors = " × ".join(f"{factor} {sizes[factor]}" for factor in other_factors)
        remedy = f"with {factors}, choose a global_batch_size of {' or '.join(map(str, nearest))}"
    factor_values = " × ".join(f"{factor} {'?' if sizes[factor] is None else sizes[factor]}" for factor in FACTORS)
    product = "" if open_keys else f" = {_multiply(sizes, FACTORS)}"
    raise InputError(f"{location}: global_batch_size {batch_size} is not {factor_values}{product}; {remedy}")


def count_micro_batches(global_batch: int, micro_batch: int, gpus: int) -> int:
    """Return the micro batches of one GPU in a step; the last one may have fewer samples, as in 128 = 48 + 48 + 32."""
    return math.ceil(global_batch / (micro_batch * gpus))


def solve_training_batch(location: str, settings: Mapping) -> dict[str, int | str]:
    """Return sizes as `solve_batch` does, and accept those of a training plan (`count_micro_batches`)."""
    sizes = {key: settings[key] for key in ("global_batch_size", *FACTORS)}
    batch_size, micro, accumulation, gpus = sizes.values()
    alternative = ""
    if isinstance(micro, int) and batch_size and batch_size % gpus == 0 and micro <= batch_size // gpus:
        needed_batches = count_micro_batches(batch_size, micro, gpus)
        if accumulation in (AUTO, needed_batches):
            return sizes | {"gradient_accumulation_steps": needed_batches}
        alternative = f"set gradient_accumulation_steps: {AUTO}"
    return solve_batch(location, settings, alternative)


def count_steps(settings: Any, rows: int) -> int:
    """Return the optimizer steps that `max_steps` or `epochs` of a training stage give for a number of rows."""
    batch = settings.global_batch_size or solve_batch("config.yaml", vars(settings))["global_batch_size"]
    return settings.max_steps or math.ceil(settings.epochs * math.ceil(rows / batch))


def find_steps(settings: Any, rows: int) -> int:
    """Return the optimizer steps of a training stage, with further epochs until `min_steps` steps change the weights.

    The first step of a warm-up does not change them, because its learning rate is zero.
    """
    steps = count_steps(settings, rows)
    if settings.max_steps or not settings.min_steps:
        return steps
    without_effect = int(settings.warmup_ratio > 0 and settings.lr_scheduler != "constant")
    return max(steps, settings.min_steps + without_effect)


def count_samples(settings: Any, rows: int) -> int:
    """Return the samples of all steps of a training stage: every row once in each epoch."""
    batch = settings.global_batch_size or solve_batch("config.yaml", vars(settings))["global_batch_size"]
    return round(rows * find_steps(settings, rows) / math.ceil(rows / batch))


def describe_steps(stage: str, settings: Any, rows: int) -> str:
    """Return sentences about epochs that `min_steps` adds; empty if it adds none."""
    planned_steps, steps = count_steps(settings, rows), find_steps(settings, rows)
    if steps == planned_steps:
        return ""
    samples = f"{pluralize(rows, 'sample')} {'gives' if rows == 1 else 'give'}"
    passes = count_samples(settings, rows) / rows
    risk = f". About {passes:.0f} passes over the same {pluralize(rows, 'row')} may memorize them"
    return (
        f"{samples} only {pluralize(planned_steps, 'step')}, so the stage {stage} adds epochs and takes {steps:,} "
        f"({stage}.min_steps: {settings.min_steps}, because a training of fewer steps hardly changes a model)"
        f"{risk if passes > HARMLESS_PASSES else ''}"
    )


def _multiply(sizes: Mapping[str, int], keys: Iterable[str]) -> int:
    return math.prod(sizes[key] for key in keys)


FROZEN = ("fp8", "nf4")  # values of `precision` for frozen layers only
FP8_CAPABILITY = (8, 9)  # minimal compute capability of the GPU: Ada
NF4_BYTES = 0.5 + 1 / 64  # per weight: its code, and its share of a scale
NF4_SCALES = 64 * 256  # 64 weights share a scale, and 256 scales share one


def can_use_nf4(elements: int) -> bool:
    """Return whether a weight with this number of elements can be stored in NF4."""
    return elements % NF4_SCALES == 0


def select_unpartitioned_choices(stage: str, settings: Any, choices: dict[str, dict]) -> dict[str, dict]:
    """Return the DeepSpeed configurations that do not partition weights: quantized weights cannot be partitioned.

    Raises:
        InputError: there is none, or the stage freezes no layer of the language model.
    """
    precision = settings.precision
    if getattr(settings, "lora", True) is None:
        raise InputError(
            f"{stage}.precision: {precision} is for frozen layers, and lora: null trains them all; "
            f"set {stage}.precision: bf16"
        )
    return select_whole_weights(choices, f"{stage}.precision: {precision}", f"set {stage}.deepspeed: zero2")


def select_whole_weights(choices: dict[str, dict], setting: str, remedy: str) -> dict[str, dict]:
    """Return the DeepSpeed configurations that do not partition weights; InputError if there is none."""
    whole_weight_choices = {
        name: config for name, config in choices.items() if config["zero_optimization"]["stage"] < 3
    }
    if not whole_weight_choices:
        raise InputError(f"{setting} needs whole weights, but {', '.join(choices)} partitions them; {remedy}")
    return whole_weight_choices


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


class StepSettings(Section):
    """Settings that give the steps of a training stage for a number of rows."""

    global_batch_size: int = setting()
    epochs: float = setting()
    max_steps: int | None = setting()
    min_steps: int = setting()
    lr_scheduler: str = setting()
    warmup_ratio: float = setting()


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


ZERO_STAGES = range(4)
BATCH_SIZES = {  # keys that fix a batch size, and the settings of the same meaning
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def list_deepspeed_names() -> list[str]:
    """Return the names of the files in config/deepspeed."""
    return list_config_names("deepspeed", ".json")


def read_deepspeed(name: str, key: str) -> dict:
    """Read and check config/deepspeed/<name>.json.

    Args:
        name: name of the file, without suffix.
        key: the setting that names it, for the message.
    """
    path = locate_config_file("deepspeed", f"{name}.json")
    names = list_deepspeed_names()
    if (stem := name.removesuffix(".json")) != name and stem in names and name not in names:
        raise InputError(f"{key}: found {name}; set {key}: {stem}, without .json")
    if name not in names:
        raise InputError(f"{key}: there is no {path}; {suggest_name(name, names)}")
    return read_deepspeed_file(path)


def read_deepspeed_file(path: Path) -> dict:
    """Read a DeepSpeed configuration and check the keys that the workflow reads or fills in."""
    config = read_json_config(path)
    stage = _read_key(config, "zero_optimization", "stage")
    if isinstance(stage, bool) or stage not in ZERO_STAGES:
        raise InputError(f"{path}: zero_optimization.stage: expected 0, 1, 2 or 3, found {quote_value(stage)}")
    enabled = _read_key(config, "bf16", "enabled")
    if enabled is not False and enabled != AUTO:
        value = quote_value(enabled)
        raise InputError(f'{path}: bf16.enabled: found {value}; set "auto", because the setting precision decides it')
    enabled = _read_key(config, "fp16", "enabled")
    if enabled not in (None, False, AUTO):
        raise InputError(f"{path}: fp16.enabled: found {quote_value(enabled)}; remove fp16, which no stage trains in")
    for key in BATCH_SIZES:
        size = config.get(key, AUTO)
        if size != AUTO and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InputError(f'{path}: {key}: expected "auto" or an integer from 1, found {quote_value(size)}')
    return config


def _read_key(config: dict, section: str, key: str) -> object:
    """Return the value of a key in a section, or None if one of them is missing."""
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


def check_batch_sizes(name: str, config: dict, stage: str, settings: Mapping) -> None:
    """Raise InputError if config/deepspeed/<name>.json fixes batch sizes that contradict the settings of a stage.

    Args:
        name: name of the file, without suffix.
        config: its content.
        stage: name of the stage, for the message.
        settings: values of the stage with the keys of `solve_batch`.
    """
    path = locate_config_file("deepspeed", f"{name}.json")
    fixed_sizes = {}
    for key, size in find_fixed_sizes(config).items():
        setting = BATCH_SIZES[key]
        if (stated_size := settings[setting]) not in (AUTO, None, size):
            raise InputError(f'{path}: {key} is {size}, but {stage}.{setting} is {stated_size}; set {key}: "auto"')
        fixed_sizes[setting] = size
    if fixed_sizes:
        solve_batch(str(path), dict(settings) | fixed_sizes)


def find_fixed_sizes(config: dict) -> dict[str, int]:
    """Return the batch sizes that a configuration fixes, by its keys."""
    return {key: config[key] for key in BATCH_SIZES if config.get(key, AUTO) != AUTO}
