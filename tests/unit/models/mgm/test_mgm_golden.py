"""Losses of the trained model compared with a plain MGM, step by step."""

from functools import partial

import pytest
import torch

from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.training.model_preparation import compile_layers
from plain_mgm import PlainMGM
from pretrain import train_projector_only
from tiny_models import pixels, tiny_mgm, training_batch


def plain_twin(model) -> PlainMGM:
    plain = PlainMGM(model.config).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    return plain


def losses_of_training(model, steps: int) -> list[float]:
    """Return the losses of steps on different batches with stage 1's AdamW, also training the language model."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(steps):
        batch = training_batch(model, seed=step) | {"pixel_values": pixels(3, seed=step, dtype=model.dtype)}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trainable(model, stage_1: bool):
    torch.manual_seed(0)
    if stage_1:
        return train_projector_only(model.train(), MGMFamily.find_parts(model))
    model.requires_grad_(True)
    for tower in (model.model.vision_tower, model.model.vision_tower_aux):
        tower.requires_grad_(False)
    return model.train()


@pytest.mark.parametrize(
    ("family", "stage_1"),
    [
        ("gemma", True),
        pytest.param("gemma", False, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
        ("qwen2", False),
    ],
)
def test_losses_of_20_steps_equal_those_of_the_plain_model(family, stage_1):
    model = tiny_mgm(family, torch.float64)
    plain = losses_of_training(trainable(plain_twin(model), stage_1), steps=20)
    own = losses_of_training(trainable(model, stage_1), steps=20)
    assert own == pytest.approx(plain, rel=1e-6)  # the loss is float32
    assert min(plain) < plain[0] - 0.05, "nothing was learnt, so that nothing was compared"


def test_gradients_equal_those_of_the_plain_model():
    model = tiny_mgm(dtype=torch.float64)
    plain, batch = plain_twin(model), training_batch(model)
    names = [name for name, _ in model.named_parameters() if "vision_tower" not in name]
    expected = torch.autograd.grad(plain(**batch).loss, [plain.get_parameter(name) for name in names])
    gradients = torch.autograd.grad(model(**batch).loss, [model.get_parameter(name) for name in names])
    for name, a, b in zip(names, gradients, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-9, name  # the head computes in float32


@pytest.mark.parametrize(
    ("backend", "every_n_layers"),
    [
        ("eager", 2),
        pytest.param("aot_eager", 1, marks=pytest.mark.slow),
        pytest.param("aot_eager", 2, marks=pytest.mark.slow),
    ],
)
def test_losses_of_compiled_layers_equal_the_plain_models(backend, every_n_layers, monkeypatch):
    # traced like on a GPU, and in slow runs differentiated ahead of time, but without compiling C++ for a minute
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = tiny_mgm()
    plain = losses_of_training(trainable(plain_twin(model), stage_1=True), steps=2)
    model = trainable(model, stage_1=True)
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every_n_layers)
    compile_layers(MGMFamily.find_parts(model))
    assert losses_of_training(model, steps=2) == pytest.approx(plain, rel=1e-4)
