from types import SimpleNamespace

import torch
from tiny_models import text_config
from transformers.masking_utils import create_causal_mask

from training.trainer import MGMTrainer


def test_images_reach_the_model_in_float32_under_a_bf16_engine():
    """transformers' Trainer casts them to the engine's dtype; the model scales them down in float32 first."""
    trainer = object.__new__(MGMTrainer)
    trainer.args = SimpleNamespace(device=torch.device("cpu"))
    trainer.is_deepspeed_enabled = True
    batch = {"pixel_values": torch.rand(1, 3, 4, 4), "input_ids": torch.ones(1, 2, dtype=torch.long)}
    prepared = trainer._prepare_input(batch)
    assert torch.equal(prepared["pixel_values"], batch["pixel_values"])
    assert {name: tensor.dtype for name, tensor in prepared.items()} == {name: t.dtype for name, t in batch.items()}


def test_no_mask_is_made_and_the_gpu_is_not_asked_whether_sequences_are_packed():
    config = text_config("gemma")
    config._attn_implementation = "sdpa"
    asked = torch.zeros(1, 4, dtype=torch.long, device="meta")  # on which a question for its values is an error
    embedded = torch.zeros(1, 4, config.hidden_size)
    assert create_causal_mask(config, embedded, attention_mask=None, past_key_values=None, position_ids=asked) is None
