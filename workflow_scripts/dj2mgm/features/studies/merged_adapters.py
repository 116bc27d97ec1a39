"""Weighted means of LoRA adapters that were trained from the same model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dj2mgm.errors import InputError
from dj2mgm.models.trained_weights import ADAPTER_FILES, PROJECTOR_FILE, check_stage
from dj2mgm.storage.files import read_json, readable, write_json

# keys of an adapter's settings that plain LoRA sets; each other one changes what the matrices mean
ADAPTER_KEYS = {
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
}
ADAPTER_KEYS |= {"r", "target_modules", "task_type", "bias", "auto_mapping"}
WITHOUT_EFFECT = {"peft_version", "megatron_core", "qalora_group_size"}


def merge_stages(weights: Mapping[Path, float], folder: Path) -> None:
    """Write the folder of a training stage with the weighted mean of the stages' adapters and projectors.

    LoRA adds `alpha / r * B @ A` to a matrix. Concatenating the matrices A by rows and the weighted matrices B by
    columns gives exactly the weighted sum of these products, as an adapter of the rank `n * r`
    (`combination_type="cat"` of PEFT's `add_weighted_adapter`).

    Args:
        weights: weight of each stage's folder; the sum is 1.
        folder: an empty folder.

    Raises:
        InputError: an adapter is damaged, or the adapters do not fit each other.
    """
    stages, shares = list(weights), list(weights.values())
    for stage in stages:
        check_stage(stage)
    config = _read_common_config(stages)
    ranks = {"r": config["r"] * len(stages), "lora_alpha": config["lora_alpha"] * len(stages)}
    adapters = _load_alike([stage / "adapter" / ADAPTER_FILES[1] for stage in stages])
    merged = {name: _merge(name, [adapter[name] for adapter in adapters], shares) for name in adapters[0]}
    (folder / "adapter").mkdir()
    write_json(folder / "adapter" / ADAPTER_FILES[0], config | ranks)
    save_file(merged, folder / "adapter" / ADAPTER_FILES[1], {"format": "pt"})
    if any((stage / PROJECTOR_FILE).is_file() for stage in stages):
        projectors = _load_alike([stage / PROJECTOR_FILE for stage in stages])
        mean = {name: _weigh([projector[name] for projector in projectors], shares) for name in projectors[0]}
        save_file(mean, folder / PROJECTOR_FILE, {"format": "pt"})


def list_weights(stage: Path) -> list[Path]:
    """Return the files of a stage that are merged."""
    files = [stage / "adapter" / name for name in ADAPTER_FILES] + [stage / PROJECTOR_FILE]
    return [file for file in files if file.is_file()]


def _read_common_config(stages: Sequence[Path]) -> dict:
    """Return the settings of all adapters; raise InputError if they differ, or if one has more than plain LoRA."""
    files = [stage / "adapter" / ADAPTER_FILES[0] for stage in stages]
    first, *others = map(read_json, files)
    for file, config in zip(files[1:], others, strict=True):
        keys = [key for key in first | config if key not in WITHOUT_EFFECT]
        if key := next((key for key in keys if first.get(key) != config.get(key)), None):
            raise InputError(f"{file}: {key} differs from {files[0]}; train both with the same settings")
    special_keys = [key for key in sorted(first) if key not in ADAPTER_KEYS | WITHOUT_EFFECT and first[key]]
    if special_keys or first.get("bias") != "none":
        key = next(iter(special_keys), "bias")
        raise InputError(f"{files[0]}: {key} is set, so the LoRAs cannot be merged; train plain LoRA")
    return first


def _load_alike(files: Sequence[Path]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each file; raise InputError unless all have the same names and shapes."""
    loaded, shapes = [], []
    for file in files:
        with readable(file, SafetensorError, OSError):
            loaded.append(load_file(file))
        shapes.append({name: tensor.shape for name, tensor in loaded[-1].items()})
        if shapes[-1] != shapes[0]:
            raise InputError(f"{file} has other tensors than {files[0]}; train both from the same model")
    return loaded


def _merge(name: str, matrices: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    if "lora_A" in name:
        return torch.cat(list(matrices), dim=0)
    scaled = [(weight * matrix.float()).to(matrix.dtype) for weight, matrix in zip(weights, matrices, strict=True)]
    return torch.cat(scaled, dim=1)


def _weigh(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean, computed in float32."""
    total = sum(weight * tensor.float() for weight, tensor in zip(weights, tensors, strict=True))
    return total.to(tensors[0].dtype)
