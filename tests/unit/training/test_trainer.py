"""Preparation of batches by the trainer, and the refusal of trainings with only warm-up steps."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import TrainerState, TrainingArguments

from dj2mgm.errors import InputError
from dj2mgm.models.mgm import MGMProcessor
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.training.trainer import ProgressLines, StageTrainer
from tiny_models import IMAGE_SIDE, tiny_processor


def mgm(processor: MGMProcessor) -> MGMFamily:
    family = object.__new__(MGMFamily)
    family.processor = processor
    return family


def test_images_stay_float32_under_a_bf16_engine():
    """Trainer's own method would cast them to the engine's dtype, but the model first downscales them in float32."""
    trainer = object.__new__(StageTrainer)
    trainer.args = SimpleNamespace(device=torch.device("cpu"))
    trainer.is_deepspeed_enabled = True
    processor, image = tiny_processor(), Image.effect_noise((IMAGE_SIDE, IMAGE_SIDE), 80).convert("RGB")
    trainer.prepare_inputs = mgm(processor).prepare_inputs
    batch = {"pixel_values": processor.resize_images([image]), "input_ids": torch.ones(1, 2, dtype=torch.long)}
    assert batch["pixel_values"].dtype == torch.uint8
    prepared = trainer._prepare_inputs(batch)
    assert prepared["pixel_values"].dtype == torch.float32 and prepared["input_ids"].dtype == torch.long
    expected = processor.image_processor([image], return_tensors="pt")["pixel_values"]  # transformers' own
    torch.testing.assert_close(prepared["pixel_values"], expected, rtol=0, atol=1e-6)


def test_training_with_only_warm_up_steps_is_refused(tmp_path):
    """The learning rate starts at zero, so a single step would change nothing but count as a success."""
    args = TrainingArguments(str(tmp_path), warmup_steps=0.03, report_to=[], use_cpu=True)
    lines = ProgressLines(tmp_path / "progress.json")
    with pytest.raises(InputError, match="the samples are enough for only 1 step.*lower global_batch_size"):
        lines.on_train_begin(args, TrainerState(max_steps=1), None)
    lines.on_train_begin(args, TrainerState(max_steps=2), None)


def test_a_batch_of_text_alone_is_prepared_without_images():
    trainer = object.__new__(StageTrainer)
    trainer.prepare_inputs = mgm(tiny_processor()).prepare_inputs
    trainer.args = SimpleNamespace(device=torch.device("cpu"))
    assert set(trainer._prepare_inputs({"input_ids": torch.ones(1, 2)})) == {"input_ids"}
