"""The resolved settings of a training stage, and the arithmetic that must hold before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from files import read_yaml


@dataclass(frozen=True)
class LoraSettings:
    r: int
    alpha: int
    dropout: float
    bias: str
    targets: list[str]  # projections of the language model's attention, as transformers names them


@dataclass(frozen=True)
class TrainingSettings:
    """One training stage. Batch sizes count samples; `deepspeed` is the content of a config/deepspeed file."""

    seed: int
    gpus: int
    cpu_threads: int | None
    template: str
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    epochs: float
    learning_rate: float
    lr_scheduler: str
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float
    max_length: int
    precision: str  # bf16, fp32, or auto: bf16 on a GPU, fp32 on a CPU
    activation_checkpointing: bool
    save_steps: int
    log_steps: int
    loader_workers: int
    deepspeed: dict
    lora: LoraSettings | None = None

    def __post_init__(self):
        check_batch(self.global_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, self.gpus)


def load_training_settings(path: str | Path) -> TrainingSettings:
    values = read_yaml(path)
    lora = values.pop("lora", None)
    return TrainingSettings(**values, lora=LoraSettings(**lora) if lora else None)


def check_batch(global_batch_size: int, micro_batch_size: int, gradient_accumulation_steps: int, gpus: int) -> None:
    """global = micro × accumulation × GPUs, exactly.

    Raises:
        InputError: with the accumulation that would make it hold, or the nearest global batches that can.
    """
    product = micro_batch_size * gradient_accumulation_steps * gpus
    if product == global_batch_size:
        return
    accumulation, rest = divmod(global_batch_size, micro_batch_size * gpus)
    if rest == 0:
        remedy = f"set gradient_accumulation_steps: {accumulation}"
    else:
        unit = micro_batch_size * gpus
        nearest = sorted({max(1, accumulation) * unit, (accumulation + 1) * unit})
        remedy = (
            f"with {micro_batch_size} × {gpus} a step, choose a global_batch_size of {' or '.join(map(str, nearest))}"
        )
    raise InputError(
        f"global_batch_size {global_batch_size} is not micro_batch_size {micro_batch_size} × "
        f"gradient_accumulation_steps {gradient_accumulation_steps} × gpus {gpus} = {product}; {remedy}"
    )
