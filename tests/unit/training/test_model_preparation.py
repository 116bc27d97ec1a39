"""Gradients of compiled and recomputed layers equal those of the plain model."""

from types import SimpleNamespace

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from dj2mgm.training.model_preparation import compile_layers

LAYERS = ["sliding_attention", "full_attention"]
# two layers use the keys and values of two earlier ones, which they find in an argument of all layers
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": LAYERS * 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}


def compute_gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_recomputed_layers_may_share_keys_and_values(monkeypatch):
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(vocab_size=64, sliding_window=16, pad_token_id=0, **SIZES, **SHARED))
    ids = torch.randint(1, 50, (2, 12))
    expected = compute_gradients(model.train(), ids)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    head = SimpleNamespace(loss_and_gradient=None)
    compile_layers(SimpleNamespace(towers=[], compiled_tower_modules=[], decoder=model.model.layers, head=head))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = compute_gradients(model, ids)
    assert gradients.keys() == expected.keys()
    assert not [name for name in expected if not torch.allclose(gradients[name], expected[name], atol=1e-6)]
