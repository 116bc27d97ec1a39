"""The language model's own weights, where fine-tuning trains all of them: a safetensors file beside the projector's."""

from pathlib import Path

from torch import nn

from mgm.projector_weights import load_into

FILE = "language_model.safetensors"
PARTS = ("model.language_model.", "lm_head.")


def language_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By their name inside `MGMForConditionalGeneration`; tied embeddings are there once."""
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(PARTS)}


def load_language_model(model: nn.Module, path: str | Path) -> None:
    load_into(language_parameters(model), path)
