"""LoRA on the language model's projections; everything else of the language model and the towers is frozen."""

import re
from dataclasses import dataclass

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from dj2mgm.config.training import refuse_unknown_targets
from dj2mgm.mgm.weights import projector_parameters


@dataclass(frozen=True)
class LoraSettings:
    r: int
    alpha: int
    dropout: float
    targets: list[str]  # projections of the language model's attention, as transformers names them


def wrap_with_lora(model: nn.Module, lora: LoraSettings) -> PeftModel:
    """LoRA matrices and projector require gradients, nothing else does.

    Raises:
        InputError: the language model has no projection that a target names. The memory plan wraps a model without
            weights first, so this comes before any is loaded.
    """
    refuse_unknown_targets(lora.targets, projections_of(model))
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        # CLIP has projections of the same names: only the language model's
        target_modules=rf".*language_model.*\.({'|'.join(map(re.escape, lora.targets))})",
        task_type="CAUSAL_LM",
    )
    # in the model's own dtype: the optimizer has a copy in float32, and PEFT would compute in float32
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in projector_parameters(wrapped).values():
        parameter.requires_grad_(True)
    return wrapped


def projections_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the language model's linear modules, in the order of the first of each."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in linear if re.match(r".*language_model.*\.", name)))
