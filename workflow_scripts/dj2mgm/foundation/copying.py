"""Copies of a foundation's parts: the folders clip, convnext and language_model."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dj2mgm.config.foundation import PARTS
from dj2mgm.files import replace_folder
from dj2mgm.model_folders import CONFIGS, PROCESSOR, TOKENIZER, check_model_folder, copy_model_files

WEIGHTS = "model.safetensors"


def copy_parts(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    for part in PARTS:
        copy_part(source / part, target / part, dtype)


def copy_part(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy a `from_pretrained` folder in one step, with its weights as `dtype`."""
    check_model_folder(source)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / WEIGHTS).items()
    }
    with replace_folder(target) as folder:
        copy_model_files(source, folder, CONFIGS | PROCESSOR | TOKENIZER)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
