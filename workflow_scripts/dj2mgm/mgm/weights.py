"""The trained parts of MGM as safetensors files: projector and patch info mining, and the language model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dj2mgm.errors import InputError
from dj2mgm.files import readable

PARTS = ("projector.", "patch_info_mining.")


def projector_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Projector and mining parameters by their name inside `MGMModel`, whatever wraps it."""
    parameters = {}
    for name, parameter in model.named_parameters():
        for part in PARTS:
            if (position := f".{name}".find(f".{part}")) >= 0:
                parameters[name[position:]] = parameter
    return parameters


def full_shapes(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Size]:
    """Shapes before partitioning (`ds_shape` where ZeRO-3 holds the parameter)."""
    return {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}


def load_projector(
    model: nn.Module,
    path: str | Path,
    gathered: Callable[[list[nn.Parameter]], AbstractContextManager] = nullcontext,
) -> None:
    """Load a stage-1 `projector.safetensors`; as `load_into`."""
    load_into(projector_parameters(model), path, gathered)


def load_into(
    parameters: dict[str, nn.Parameter],
    path: str | Path,
    gathered: Callable[[list[nn.Parameter]], AbstractContextManager] = nullcontext,
) -> None:
    """Load a safetensors file that a training stage wrote. Every tensor must be there and fit.

    Args:
        gathered: the context in which partitioned parameters are whole and may be written, under ZeRO-3.

    Raises:
        InputError: the file is damaged or of another model.
    """
    with readable(path, SafetensorError):
        weights = load_file(path)
    shapes = full_shapes(parameters)
    if set(weights) != set(shapes) or any(weights[name].shape != shapes[name] for name in shapes):
        raise InputError(f"{path} does not fit this model; it was trained with another one: run its stage again")
    for name, parameter in parameters.items():
        with gathered([parameter]), torch.no_grad():
            parameter.copy_(weights[name])


# The language model's own weights, where fine-tuning trains all of them: a safetensors file beside the projector's.

LANGUAGE_MODEL_FILE = "language_model.safetensors"
LANGUAGE_MODEL_PARTS = ("model.language_model.", "lm_head.")


def language_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By their name inside `MGMForConditionalGeneration`; tied embeddings are there once."""
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(LANGUAGE_MODEL_PARTS)}


def load_language_model(model: nn.Module, path: str | Path) -> None:
    load_into(language_parameters(model), path)
