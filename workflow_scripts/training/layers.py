"""The layers of an MGM, in which a training step spends its time."""

from deepspeed.runtime.zero import register_external_parameter
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

from mgm import MGMForConditionalGeneration


def mgm_in(model: nn.Module) -> MGMForConditionalGeneration:
    """The MGM in a model, whatever wraps it."""
    [mgm] = [module for module in model.modules() if isinstance(module, MGMForConditionalGeneration)]
    return mgm


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Layers of both towers and of the decoder, in the order in which they run."""
    mgm = mgm_in(model).model
    blocks = [block for stage in mgm.vision_tower_aux.encoder.stages for block in stage.layers]
    return [*mgm.vision_tower.encoder.layers, *blocks, *mgm.language_model.layers]


def gather_whole_layers(model: nn.Module) -> None:
    """Let ZeRO-3 gather and release whole layers: its hooks around each of the hundreds of modules in them take longer
    than a GPU computes."""
    set_z3_leaf_modules(model, list({type(layer) for layer in layers_of(model)}))
    # Not a leaf: the gradients of a leaf count as complete once those of its inputs are, and its inputs have none.
    mining = mgm_in(model).model.patch_info_mining
    for parameter in mining.parameters():
        if is_zero_param(parameter):
            register_external_parameter(mining, parameter)
