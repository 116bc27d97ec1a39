"""LoRA on the language model's projections; the rest of the language model and the towers stay frozen."""

import re

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from dj2mgm.models.trained_weights import find_projector_parameters
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
