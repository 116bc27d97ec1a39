"""Whether two models see with the same image tower, by the weights of its first layer.

Names do not tell: a tower is copied into a whole model, where it may be rounded, and a folder may be a copy. The first
layer's weights differ between any two towers that were trained apart.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from dj2mgm.config.clips import folder_of

FIRST_LAYER = "patch_embedding.weight"  # ends the tensor's name in CLIP and SigLIP, alone or in a whole model
ROUNDING = {"rtol": 2.0**-8, "atol": 1e-6}  # of float32 to bfloat16 or float16, and back


def shares_image_tower(one: str, other: str) -> bool:
    """
    Args:
        one, other: local folders or hub ids; of a hub id that was not fetched only the name is compared.
    """
    if one.rstrip("/") == other.rstrip("/"):
        return True
    return any(
        left.shape == right.shape and torch.allclose(left, right, **ROUNDING)
        for left in _first_layers(one)
        for right in _first_layers(other)
    )


def _first_layers(name: str) -> list[torch.Tensor]:
    """(C, 3, P, P) float32 of each image tower of a model."""
    folder = folder_of(name)
    layers = []
    for file in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        with safe_open(file, framework="pt") as tensors:
            named = [key for key in tensors.keys() if key.endswith(FIRST_LAYER)]  # noqa: SIM118  (no mapping)
            layers += [tensors.get_tensor(key).float() for key in named]
    return layers
