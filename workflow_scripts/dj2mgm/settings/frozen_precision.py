"""Precisions of frozen layers, FP8 and NF4: what they need of the GPU, the weights and DeepSpeed."""

from typing import Any

from dj2mgm.errors import InputError

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
