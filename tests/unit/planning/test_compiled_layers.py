"""Memory that the plan counts for a compiled layer, compared with the tensors that torch.compile keeps."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModel, Gemma2Config, GemmaConfig, PreTrainedConfig, PreTrainedModel

from dj2mgm.planning.meta_kernels import ATTENTION, fuse_layers, register_attention

SHAPE = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.0, "pad_token_id": 0}
GEMMA_2 = Gemma2Config(**SHAPE | {"attention_dropout": 0.1})
SAMPLES, TOKENS = 3, 40


def build_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    model = AutoModel.from_config(config, attn_implementation=attention).requires_grad_(False)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "o_proj"])
    inject_adapter_in_model(lora, model)
    return model.to(torch.bfloat16).train()


def count_saved_bytes(layer: nn.Module, call: Callable, attention: str, device: str) -> int:
    """Return the bytes that a forward pass keeps, except those of weights and of the layer's arguments."""
    hidden = torch.randn(SAMPLES, TOKENS, SHAPE["hidden_size"], dtype=torch.bfloat16, device=device, requires_grad=True)
    rotary = [torch.randn(1, TOKENS, SHAPE["head_dim"], dtype=torch.bfloat16, device=device) for _ in range(2)]
    mask = torch.zeros(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bfloat16, device=device)
    arguments = [*layer.parameters(), hidden, *rotary, mask]
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(hidden, position_embeddings=tuple(rotary), attention_mask=mask if attention == "eager" else None)
    for tensor in arguments:
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow  # test_prediction.py compares plans with measured runs of compiled layers
@pytest.mark.parametrize(
    ("config", "attention", "planned", "tolerance"),
    [
        (GemmaConfig(**SHAPE), "sdpa", ATTENTION, 0.01),
        (GEMMA_2, "eager", "eager", 0.06),  # the plan also keeps inputs of norms
    ],
    ids=["gemma", "gemma2"],
)
def test_the_plan_counts_what_torch_compile_keeps(config, attention, planned, tolerance):
    model = build_model(config, attention)
    [layer] = model.layers
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=True)
    expected = count_saved_bytes(layer, compiled, attention, "cpu")
    register_attention()
    model.to("meta").set_attn_implementation(planned)
    fuse_layers(model, nn.Linear(1, 1))
    assert count_saved_bytes(layer, layer, attention, "meta") == pytest.approx(expected, rel=tolerance)
