"""Checks of training settings when Snakemake starts: FlashAttention, FP8, LoRA targets."""

import os
from importlib.util import find_spec
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.settings.config_files import locate_config_file, read_json_config
from dj2mgm.settings.configuration import Configuration, Experiment
from dj2mgm.settings.models import ModelFile
from dj2mgm.settings.training_stages import FLASH_ATTENTION, refuse_unknown_targets

GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
GATED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# by transformers' model type; for other types, the stage reads the model itself (trained_weights.py)
PROJECTIONS = dict.fromkeys(("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"), GATED_PROJECTIONS)


def require_flash_attention(config: Configuration) -> None:
    """Raise InputError if a stage needs FlashAttention and its package is not installed here."""
    for stage in ("pretrain", "finetune"):
        if getattr(config, stage).attn_implementation == FLASH_ATTENTION and find_spec("flash_attn") is None:
            raise InputError(
                f"{stage}.attn_implementation: {FLASH_ATTENTION} needs the package flash-attn, which is not installed; "
                "install it, or set auto, which uses it if it is installed"
            )


def require_fp8_device(config: Configuration) -> None:
    """Raise InputError if a stage computes in FP8 and this machine has no NVIDIA GPU; the stage checks its generation.

    The device files are those of Linux and of WSL.
    """
    for stage in ("pretrain", "finetune"):
        if getattr(config, stage).precision == "fp8" and not any(map(os.path.exists, GPU_DEVICES)):
            raise InputError(f"{stage}.precision: fp8 needs an NVIDIA GPU, and this machine has none; set bf16 or auto")


def check_lora_targets(config: Experiment) -> None:
    """Raise InputError if the language model has no projection with the name of a LoRA target."""
    lora, projections = config.finetune.lora, PROJECTIONS.get(_find_language_model_type(config.model))
    if lora and lora.targets != "all" and projections:
        refuse_unknown_targets(lora.targets, projections)


def _find_language_model_type(model: ModelFile) -> str | None:
    """Return the type of the language model, or None if no file states it."""
    if model.trained_type:
        return model.trained_type
    folder = Path(model.language_model_source)
    for file in (folder / "config.json", locate_config_file("architectures", f"{folder.name.lower()}.json")):
        try:
            values = read_json_config(file)
        except InputError:  # reported by the stage that reads the file
            continue
        language_model = values.get("text_config") if model.whole_model else values
        return language_model.get("model_type") if isinstance(language_model, dict) else None
    return None
