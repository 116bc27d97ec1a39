"""Compiled layers for answers about many images."""

import torch
from torch import nn

from dj2mgm.mgm.modeling_mgm import MGMForConditionalGeneration, tower_layers


def compile_layers(model: MGMForConditionalGeneration) -> None:
    """Compile, in place and once, the towers' layers and the parts of the decoder's layers except attention.

    Attention reads the cache, which differs from layer to layer; its code would be compiled for each.
    """
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)  # ConvNeXt has four widths
    for layer in tower_layers(model.model):
        _compile(layer, dimensions=1)
    for layer in model.model.language_model.layers:
        for part in layer.children():
            if part is not layer.self_attn:
                _compile(part, dimensions=2)


def _compile(module: nn.Module, dimensions: int) -> None:
    """Compile the module's forward; the first `dimensions` dimensions of its input differ from call to call."""
    if "forward" in vars(module):  # compiled already
        return
    forward = type(module).forward
    compiled = torch.compile(getattr(forward, "__wrapped__", forward).__get__(module))  # without checkpointing

    def marked(values: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        for dimension in range(dimensions):
            torch._dynamo.maybe_mark_dynamic(values, dimension)
        return compiled(values, *args, **kwargs)

    module.forward = marked
