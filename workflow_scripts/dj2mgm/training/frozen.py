"""Replaces frozen linear layers by ones that hold their weights in fewer bits (`precision: fp8`, `precision: nf4`)."""

from deepspeed.runtime.zero.utils import is_zero_param
from torch import nn

from dj2mgm.errors import InputError
from dj2mgm.training.fp8 import FrozenFP8Linear
from dj2mgm.training.nf4 import FrozenNF4Linear

LAYERS = {"fp8": FrozenFP8Linear, "nf4": FrozenNF4Linear}


def replace_frozen_layers(model: nn.Module, precision: str) -> None:
    """In place: all linear layers within `model` whose weight is frozen and of a size that the format takes.

    Raises:
        InputError: there is none, or ZeRO-3 divides them.
    """
    layer = LAYERS[precision]
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child.weight.requires_grad
    ]
    if any(is_zero_param(child.weight) for *_, child in found):
        raise InputError(f"precision: {precision} needs whole weights, which ZeRO-3 divides; set deepspeed: zero2")
    found = [each for each in found if layer.takes(each[2].weight)]
    if not found:
        raise InputError(f"precision: {precision} finds no frozen layer of a size that it takes; set precision: bf16")
    for parent, name, child in found:
        setattr(parent, name, layer(child))
