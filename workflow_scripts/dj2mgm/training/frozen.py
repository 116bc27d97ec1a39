"""Replace frozen linear layers by layers with weights of fewer bits (`precision: fp8`, `precision: nf4`)."""

from deepspeed.runtime.zero.utils import is_zero_param
from torch import nn

from dj2mgm.errors import InputError
from dj2mgm.training.fp8 import FrozenFP8Linear
from dj2mgm.training.nf4 import FrozenNF4Linear

FROZEN_LAYERS = {"fp8": FrozenFP8Linear, "nf4": FrozenNF4Linear}


def replace_frozen_layers(model: nn.Module, precision: str) -> None:
    """Replace, in place, all linear layers of `model` whose weight is frozen and has a size that the format supports.

    Raises:
        InputError: there is no such layer, or ZeRO-3 partitions the weights.
    """
    layer = FROZEN_LAYERS[precision]
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child.weight.requires_grad
    ]
    if any(is_zero_param(child.weight) for *_, child in found):
        raise InputError(f"precision: {precision} needs whole weights, but ZeRO-3 splits them; set deepspeed: zero2")
    found = [each for each in found if layer.supports(each[2].weight)]
    if not found:
        raise InputError(f"precision: {precision} supports the size of no frozen layer; set precision: bf16")
    for parent, name, child in found:
        setattr(parent, name, layer(child))
