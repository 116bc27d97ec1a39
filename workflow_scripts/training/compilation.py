"""Compiles what a training step spends its time in, piece by piece, with torch.compile.

Pieces, because layers of one shape share their compiled code, and because DeepSpeed's and PEFT's hooks on whole models
stay outside of it: only what a layer's own `forward` computes is compiled, once for each shape it meets.
"""

import torch
from torch import nn

from mgm import MGMForConditionalGeneration


def compile_layers(model: nn.Module) -> None:
    """Compile, in place, the layers of both towers and of the decoder, the mining and the loss of a (wrapped) MGM."""
    [mgm] = [module for module in model.modules() if isinstance(module, MGMForConditionalGeneration)]
    tower, aux, language = mgm.model.vision_tower, mgm.model.vision_tower_aux, mgm.model.language_model
    blocks = [block for stage in aux.encoder.stages for block in stage.layers]
    # one compiled code for each stage's width, and again for a last, smaller batch
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    for layer in (*tower.encoder.layers, *blocks, mgm.model.patch_info_mining, *language.layers):
        layer.forward = torch.compile(layer.forward)
    mgm.lm_head.loss_and_gradient = torch.compile(mgm.lm_head.loss_and_gradient)
