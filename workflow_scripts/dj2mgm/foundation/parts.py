"""The parts of a foundation as folders: clip, convnext and language_model."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dj2mgm.config.foundation import PARTS
from dj2mgm.files import replace_folder

WEIGHTS = "model.safetensors"


def copy_parts(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    for part in PARTS:
        copy_part(source / part, target / part, dtype)


def copy_part(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy a `from_pretrained` folder, its weights as `dtype`; the target is whole or not there."""
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / WEIGHTS).items()
    }
    with replace_folder(target) as folder:
        for file in sorted(source.iterdir()):
            if file.name != WEIGHTS:
                shutil.copyfile(file, folder / file.name)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
