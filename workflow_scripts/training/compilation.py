"""Compiles what a training step spends its time in, piece by piece, with torch.compile.

Pieces, because layers of one shape share their compiled code, and because DeepSpeed's hooks around a layer stay outside
of it: only what a layer's own `forward` computes is compiled, once for each shape it meets.
"""

import torch
from torch import nn

from training.layers import layers_of, mgm_in


def compile_layers(model: nn.Module) -> None:
    """Compile, in place, the layers of an MGM's towers and decoder, ConvNeXt's norms between them, and its loss.

    Patch info mining is matrix products and copies already; compiled, it was slower.
    """
    # ConvNeXt's blocks have four widths, and a last batch is smaller
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    mgm = mgm_in(model)
    tower = mgm.model.vision_tower_aux
    norms = [tower.embeddings.layernorm, *(stage.downsampling_layer[0] for stage in tower.encoder.stages[1:])]
    for layer in (*layers_of(model), *norms):
        layer.forward = torch.compile(layer.forward)
    mgm.lm_head.loss_and_gradient = torch.compile(mgm.lm_head.loss_and_gradient)
