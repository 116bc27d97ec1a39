"""Compiled and recomputed layers, and convolutions that are planned before the first step."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.training.model_preparation import compile_layers, plan_convolutions
from dj2mgm.training.trainer import StageTrainer
from dj2mgm.training.training_data import StepBatches
from tiny_models import pixels, tiny_mgm

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


def test_convolutions_are_planned_for_the_shapes_of_the_tower():
    """CuDNN compiles again for any other shape or memory layout."""
    calls, convolve = [], functional.conv2d

    def record(features, weight, bias, *args, **options):
        if weight.shape[1] == 1:  # depthwise
            calls.append((features.shape, features.stride(), weight.shape, bias.shape, features.dtype))
        return convolve(features, weight, bias, *args, **options)

    model = tiny_mgm(dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "conv2d", record)
        plan_convolutions(MGMFamily.find_parts(model).depthwise_convolutions, [2], torch.device("cpu"), torch.bfloat16)
        planned = set(calls)
        calls.clear()
        model.model.compute_stage_features(pixels(2))
    assert set(calls) == planned and len(planned) == 4


def test_kernels_are_prepared_for_the_numbers_of_images_of_the_next_steps():
    trainer = object.__new__(StageTrainer)
    trainer.train_dataset = SimpleNamespace(images=[0, 1, 1, 1, 0, 2, 1, 1])
    trainer.batches = StepBatches([8] * 8, micro_batch_size=2, global_batch=4, seed=0)
    micro_batches = [batch for number in range(2) for batch in trainer.batches.step(0, number)]
    expected = {sum(trainer.train_dataset.images[row] for row in batch) for batch in micro_batches} - {0}
    assert trainer._list_numbers_of_images() == sorted(expected)
