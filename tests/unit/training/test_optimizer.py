"""The optimizer with 8-bit states for weights in bf16."""

from types import SimpleNamespace

import pytest
import torch

from dj2mgm.training.arguments import choose_optimizer


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Do not compile torchao's update, because compilation takes longer than the tests."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def make_optimizer(learning_rate: float, weight_decay: float = 0.0):
    optimizer, arguments = choose_optimizer(
        SimpleNamespace(deepspeed={}, learning_rate=learning_rate, weight_decay=weight_decay, seed=0)
    )
    return lambda parameters: optimizer(parameters, **arguments)


def losses(choose_optimizer, dtype: torch.dtype, steps: int) -> list[float]:
    """Return the losses of a small network that learns a fixed function."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    inputs, target = torch.randn(256, 64), torch.randn(256, 64)
    network = network.to(dtype)
    optimizer = choose_optimizer(network.parameters())
    values = []
    for _ in range(steps):
        loss = (network(inputs.to(dtype)).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def test_fifty_steps_stay_within_2_percent_of_float32_adamw():
    expected = losses(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01), torch.float32, 50)
    result = losses(make_optimizer(1e-3, 0.01), torch.bfloat16, 50)
    assert expected[-1] < 0.8 * expected[0], "nothing was learnt, so that nothing was compared"
    assert result == pytest.approx(expected, rel=0.02)


def test_small_updates_are_not_lost_to_rounding():
    """Weights are 1 and updates 1e-4, while the next bf16 number below 1 is 4e-3 away."""
    weights = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    optimizer = make_optimizer(1e-4)([weights])
    for _ in range(100):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    assert weights.float().mean().item() == pytest.approx(1 - 100 * 1e-4, abs=1e-3)
    nearest = torch.ones(1, dtype=torch.bfloat16) - 1e-4
    assert nearest.item() == 1.0


def test_states_need_one_byte_per_weight():
    weights = torch.nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))
    optimizer = make_optimizer(1e-3)([weights])
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[weights][name].codes.dtype == torch.uint8


def test_updates_without_gradients_equal_those_in_float32():
    """Gradients in a block of states span four decades, and are then zero for half or all weights."""
    learning_rate = 1e-3
    torch.manual_seed(0)
    scale = 1e-2 * 10 ** (-4 * torch.rand(64, 256))
    signs = torch.randn(64, 256)
    moved = []
    for make in (make_optimizer(learning_rate), lambda weights: torch.optim.AdamW(weights, learning_rate)):
        weights = torch.nn.Parameter(torch.zeros(64, 256))
        optimizer = make([weights])
        torch.manual_seed(1)
        furthest = []
        for step in range(26):
            weights.grad = scale * (signs + 0.3 * torch.randn(64, 256))
            weights.grad[:, :128] *= step < 20
            weights.grad *= step < 23
            before = weights.detach().clone()
            optimizer.step()
            furthest.append(((weights.detach() - before).abs().max() / learning_rate).item())
        moved.append(furthest[20:])
    assert max(moved[0]) < 2 * max(moved[1]), moved
