"""Weighted means of LoRA adapters that were trained from the same model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dj2mgm.errors import InputError
from dj2mgm.models.trained_weights import ADAPTER, check_stage
from dj2mgm.storage.files import read_json, write_json

PROJECTOR = "projector.safetensors"


def merge_stages(weights: Mapping[Path, float], folder: Path) -> None:
    """Write the folder of a training stage with the weighted mean of the stages' adapters and projectors.

    LoRA adds `alpha / r * B @ A` to a matrix. The matrices A of all adapters one below the other and the weighted
    matrices B side by side give exactly the weighted sum of these products, as an adapter of the rank `n * r`
    (`combination_type="cat"` of PEFT's `add_weighted_adapter`).

    Args:
        weights: weight of each stage's folder; the sum is 1.
        folder: an empty folder.

    Raises:
        InputError: an adapter is damaged, or the adapters do not fit each other.
    """
    stages = list(weights)
    for stage in stages:
        check_stage(stage)
    configs = [read_json(stage / "adapter" / ADAPTER[0]) for stage in stages]
    first = configs[0]
    if any(config != first for config in configs) or first.get("use_dora") or first.get("use_rslora"):
        raise InputError(f"the LoRAs of {' and '.join(map(str, stages))} have different settings, or are no plain LoRA")
    ranks = {"r": first["r"] * len(stages), "lora_alpha": first["lora_alpha"] * len(stages)}
    adapters = [load_file(stage / "adapter" / ADAPTER[1]) for stage in stages]
    merged = {
        name: _merge(name, [adapter[name] for adapter in adapters], list(weights.values())) for name in adapters[0]
    }
    (folder / "adapter").mkdir()
    write_json(folder / "adapter" / ADAPTER[0], first | ranks)
    save_file(merged, folder / "adapter" / ADAPTER[1], {"format": "pt"})
    if (stages[0] / PROJECTOR).is_file():
        projectors = [load_file(stage / PROJECTOR) for stage in stages]
        mean = {
            name: _weigh([projector[name] for projector in projectors], list(weights.values()))
            for name in projectors[0]
        }
        save_file(mean, folder / PROJECTOR, {"format": "pt"})


def _merge(name: str, matrices: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    if "lora_A" in name:
        return torch.cat(list(matrices), dim=0)
    scaled = [(weight * matrix.float()).to(matrix.dtype) for weight, matrix in zip(weights, matrices, strict=True)]
    return torch.cat(scaled, dim=1)


def _weigh(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean, computed in float32."""
    total = sum(weight * tensor.float() for weight, tensor in zip(weights, tensors, strict=True))
    return total.to(tensors[0].dtype)
