"""Comparison of the image towers of two models by the weights of their first layer.

Names are not enough: a tower is copied, and possibly rounded, into a whole model, and a folder may be a copy. The first
layers of two separately trained towers always differ.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from dj2mgm.config.clips import folder_of

FIRST_LAYER = "patch_embedding.weight"  # end of the tensor's name in CLIP and SigLIP, also within a whole model
ROUNDING = {"rtol": 2.0**-8, "atol": 1e-6}  # from float32 to bfloat16 or float16 and back


def shares_image_tower(one: str, other: str) -> bool:
    """Return whether two models have the same image tower.

    Args:
        one: Local folder or hub id; only the name of a hub id that was not downloaded is compared.
        other: Likewise.
    """
    if one.rstrip("/") == other.rstrip("/"):
        return True
    return any(
        left.shape == right.shape and torch.allclose(left, right, **ROUNDING)
        for left in _first_layers(one)
        for right in _first_layers(other)
    )


def _first_layers(name: str) -> list[torch.Tensor]:
    """Return the first layer (C, 3, P, P) float32 of each image tower of a model."""
    folder = folder_of(name)
    layers = []
    for file in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        with safe_open(file, framework="pt") as tensors:
            named = [key for key in tensors.keys() if key.endswith(FIRST_LAYER)]
            layers += [tensors.get_tensor(key).float() for key in named]
    return layers
