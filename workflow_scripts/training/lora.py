"""LoRA on the language model's projections; everything else of the language model and the towers is frozen."""

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from mgm.projector_weights import projector_parameters
from training.settings import LoraSettings


def wrap_with_lora(model: nn.Module, lora: LoraSettings) -> PeftModel:
    """LoRA matrices and projector require gradients, nothing else does."""
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        # CLIP has projections of the same names: only the language model's
        target_modules=rf".*language_model.*\.({'|'.join(lora.targets)})",
        task_type="CAUSAL_LM",
    )
    # in the model's own dtype: the optimizer has a copy in float32, and PEFT would compute in float32
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in projector_parameters(wrapped).values():
        parameter.requires_grad_(True)
    return wrapped
