from types import SimpleNamespace

import torch

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
