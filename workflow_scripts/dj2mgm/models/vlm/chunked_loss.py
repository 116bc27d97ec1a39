"""Loss of transformers' models at supervised positions only, in chunks."""

from types import MethodType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from dj2mgm.errors import InputError
from dj2mgm.models.loss import LanguageModelHead, compute_answer_loss, compute_loss_and_gradient, find_answer_positions
from dj2mgm.models.vlm.packed_images import use_tower_inputs

# configuration keys that scale the logits or their inputs
SCALE_KEYS = ("logits_scaling", "logit_scale", "logits_mup_width_multiplier")


def use_chunked_loss(model: PreTrainedModel) -> None:
    """Let the model compute its loss at supervised positions only, in chunks (loss.py); change it in place.

    Parameters keep their names. A head that does more than multiply hidden states with its weight and cap the logits is
    refused.
    """
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    is_scaled = any(getattr(text, key, None) not in (None, 0, 1) for key in SCALE_KEYS)
    softcap = getattr(text, "final_logit_softcapping", None)
    if type(head) is not nn.Linear or head.bias is not None or is_scaled or not _is_product(model, head, softcap):
        raise InputError(
            f"models of type {model.config.model_type} are not supported: their logits are not the product of hidden "
            "states and the head's weight"
        )
    head.__class__ = LanguageModelHead
    head.softcap = softcap
    head.loss_and_gradient = lambda logits, targets: compute_loss_and_gradient(logits, targets, softcap)
    original_forward, take_tower_inputs = model.forward, use_tower_inputs(model)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        answer_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ):
        take_tower_inputs(kwargs)
        if labels is None:
            return original_forward(input_ids=input_ids, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        if answer_positions is None:
            answer_positions = find_answer_positions(labels)
        loss = compute_answer_loss(self.lm_head, hidden, labels, answer_positions, num_items_in_batch)
        return CausalLMOutput(loss=loss)

    model.forward = MethodType(forward, model)
    model.accepts_loss_kwargs = True  # otherwise Trainer does not pass num_items_in_batch


@torch.no_grad()
def _is_product(model: PreTrainedModel, head: nn.Linear, softcap: float | None) -> bool:
    """Return whether logits are the last hidden states times the head's weight, capped by `softcap`.

    The check is skipped, with the result True, for a weight that ZeRO-3 partitions or that is on the meta device.
    """
    if hasattr(head.weight, "ds_id") or head.weight.is_meta:
        return True
    ids = torch.arange(1, 5, device=model.device)[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    product = head(hidden)
    bounded = product if softcap is None else softcap * (product / softcap).tanh()
    return torch.allclose(model(input_ids=ids, use_cache=False).logits, bounded, rtol=1e-2, atol=1e-2)
