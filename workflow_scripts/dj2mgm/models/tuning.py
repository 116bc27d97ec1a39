"""Tunings of the training stages: which parameters each one trains, in training and in the memory plan.

LoRA is applied to the language model's projections; the rest of the language model and the towers stay frozen.
"""

import re
from typing import Literal, get_args

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from dj2mgm.errors import InputError
from dj2mgm.models.trained_weights import find_language_parameters, find_projector_parameters
from dj2mgm.settings.training_stages import LoraSettings, refuse_unknown_targets


def wrap_with_lora(model: nn.Module, lora: LoraSettings, decoder: nn.Module, projector: bool = True) -> PeftModel:
    """Wrap a model so that only LoRA matrices in `decoder` require gradients, and the projector if `projector`.

    A target that is no projection of the language model is refused. The memory plan, which wraps a model without
    weights, does so before weights are loaded.
    """
    projections = find_projections(decoder)
    targets = projections if lora.targets == "all" else lora.targets
    refuse_unknown_targets(targets, projections)
    [within] = [name for name, module in model.named_modules() if module is decoder]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        # towers have projections of the same names
        target_modules=rf"{re.escape(within)}\..*\.({'|'.join(map(re.escape, targets))})",
        task_type="CAUSAL_LM",
    )
    # The adapter keeps the model's dtype. PEFT would compute in float32, of which the optimizer has a copy anyway.
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in find_projector_parameters(wrapped).values():
        parameter.requires_grad_(projector)
    return wrapped


def find_projections(decoder: nn.Module) -> tuple[str, ...]:
    """Return the distinct names of a decoder's linear modules, in the order of their first occurrence."""
    linear = (name for name, module in decoder.named_modules() if isinstance(module, nn.Linear))
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in linear))


# stage1 trains the projector, which includes MGM's patch info mining; lora also LoRA matrices of the language model;
# full also the language model itself
Tuning = Literal["stage1", "lora", "full"]
TUNINGS: tuple[Tuning, ...] = get_args(Tuning)
ROUTER_NAMES = {"router", "gate"}  # names of routers, or of the modules that contain them


def choose_tuning(stage: str, lora: LoraSettings | None) -> Tuning:
    """Return the tuning of the stage pretrain or finetune."""
    if stage == "pretrain":
        return "stage1"
    return "lora" if lora else "full"


def select_trained_parameters(
    model: nn.Module, decoder: nn.Module, tuning: Tuning, lora: LoraSettings | None = None, projector: bool = True
) -> nn.Module:
    """Freeze everything that a tuning does not train; return the model, which LoRA wraps.

    Args:
        model: the base model.
        decoder: its module with the layers of the language model.
        tuning: decides which parameters require gradients afterwards.
        lora: settings of the tuning `lora`.
        projector: whether LoRA also trains the projector; the other tunings always do.

    Raises:
        InputError: the model has no known module between towers and language model, or no projection that `lora` names.
    """
    if tuning == "lora":
        return wrap_with_lora(model, lora, decoder, projector=projector)
    model.requires_grad_(False)
    trained = find_projector_parameters(model)
    if not trained:
        remedy = "remove `pretrain`" if tuning == "stage1" else "train LoRA instead"
        raise InputError(f"no known module connects this model's towers and language model; {remedy}")
    if tuning == "full":
        trained |= find_language_parameters(model)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    return model


def list_frozen_layers(decoder: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the frozen linear layers that may be quantized, each with its parent module and its name there.

    Routers of experts keep their precision, because rounding would choose other experts.
    """
    return [
        (parent, name, child)
        for path, parent in decoder.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child.weight.requires_grad and not ROUTER_NAMES & {*path.split("."), name}
    ]
