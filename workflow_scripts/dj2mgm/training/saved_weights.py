"""Collect trained weights from a (possibly partitioned) model, check them and save them.

Both stages train projector and patch info mining; stage 2 also trains LoRA matrices or the language model. Frozen
weights are not written again.
"""

from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file
from torch import nn

from dj2mgm.files import replace_file
from dj2mgm.mgm.trained_weights import projector_parameters


class BrokenWeights(Exception):
    """Weights that must not be saved: missing, incomplete, not finite, or never trained."""


ELEMENTS_AT_ONCE = 2**24  # elements tested at a time, because a test for finite values makes copies


def gather_weights(parameters: dict[str, torch.nn.Parameter], keep: bool = True) -> dict[str, torch.Tensor]:
    """Return whole CPU copies of parameters that ZeRO may have partitioned.

    Every rank must call it. Only ranks with `keep` get the copies, which take host memory.
    """
    whole = {}
    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters([parameter]):
            if keep:
                whole[name] = parameter.detach().to("cpu", copy=True).contiguous()
    return whole


def check_weights(weights: dict[str, torch.Tensor], shapes: dict[str, torch.Size], steps: int) -> None:
    """Check that all weights are there, whole and finite, and that LoRA's B matrices are not all zero.

    `shapes` are the expected ones by name; after one of `steps`, whose learning rate may be zero, B may be zero.

    Raises:
        BrokenWeights: a weight is not valid. The message names the tensor.
    """
    if missing := sorted(set(shapes) - set(weights)):
        raise BrokenWeights(f"tensor {missing[0]} is missing ({len(missing)} in all)")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise BrokenWeights(f"tensor {name} has shape {tuple(weights[name].shape)} instead of {tuple(shape)}")
        if not all(torch.isfinite(part).all() for part in weights[name].flatten().split(ELEMENTS_AT_ONCE)):
            raise BrokenWeights(f"tensor {name} holds values that are not finite")
    lora_b = [tensor for name, tensor in weights.items() if "lora_B" in name]
    if steps > 1 and lora_b and not any(tensor.any() for tensor in lora_b):
        raise BrokenWeights("every lora_B matrix is zero: nothing was trained")


def save_projector(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write projector and mining, out of all trained weights, under their names inside `MGMModel`."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    projector = {name: weights[by_id[id(parameter)]] for name, parameter in projector_parameters(model).items()}
    save_weights(projector, folder / "projector.safetensors")


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    with replace_file(path, "wb") as file:
        save_file(weights, file.name)  # not as bytes, which would be a second copy of all weights
