"""Frozen layers in FP8: products close to full precision, gradients of inputs, and refused settings."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dj2mgm.errors import InputError
from dj2mgm.settings.training_stages import select_unpartitioned_choices
from dj2mgm.training.frozen_layers import FrozenFP8Linear, quantize_rows, replace_frozen_layers, require_fp8


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48).to(torch.bfloat16).requires_grad_(False)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.float() - expected.float()).norm() / expected.float().norm()).item()


def test_output_and_gradient_are_close_to_full_precision(linear):
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    output, gradient = FrozenFP8Linear(linear)(x), torch.randn(2, 5, 48, dtype=torch.bfloat16)
    output.backward(gradient)
    assert relative(output, x.float() @ linear.weight.float().T + linear.bias.float()) < 0.05
    assert relative(x.grad, gradient.float() @ linear.weight.float()) < 0.05


def test_products_of_exact_e4m3_values_are_exact(linear):
    """Rows of powers of two differ in magnitude, so only a scale per row brings all of them into range."""
    weight = torch.zeros(48, 64)
    weight[torch.arange(48), torch.arange(48)] = 2.0 ** (torch.arange(48) - 24)
    linear.weight.copy_(weight)
    linear.bias.zero_()
    x = (2.0 ** torch.randint(-3, 3, (16, 64))).to(torch.bfloat16)
    # scales are amax / 448, so exact values are rounded once in bf16
    assert torch.allclose(FrozenFP8Linear(linear)(x).float(), x.float() @ weight.T, rtol=2**-7, atol=0)


def test_rows_are_restored_to_within_half_a_step():
    matrix = torch.randn(7, 256) * 10.0 ** torch.arange(-3, 4).unsqueeze(1)
    values, scales = quantize_rows(matrix)
    error = (values.float() * scales - matrix).abs()
    assert (error <= matrix.abs() / 16 + scales * 2**-10).all()  # three mantissa bits; the smallest subnormal number
    assert quantize_rows(torch.zeros(2, 16))[0].float().eq(0).all()


def test_casting_the_model_to_bf16_keeps_fp8_layers(linear):
    frozen, x = FrozenFP8Linear(linear), torch.randn(3, 64, dtype=torch.bfloat16)
    before = frozen(x)
    assert torch.equal(frozen.bfloat16()(x), before)


def test_only_frozen_layers_of_even_sizes_are_replaced():
    layers = nn.ModuleDict(
        {"frozen": nn.Linear(32, 16), "trained": nn.Linear(32, 16), "odd": nn.Linear(32, 24), "norm": nn.LayerNorm(32)}
    )
    layers.requires_grad_(False)
    layers["trained"].requires_grad_(True)
    replace_frozen_layers(nn.ModuleList([layers]), "fp8")
    assert {name: type(layer).__name__ for name, layer in layers.items()} == {
        "frozen": "FrozenFP8Linear",
        "trained": "Linear",
        "odd": "Linear",
        "norm": "LayerNorm",
    }


def test_routers_of_experts_keep_their_precision():
    router = nn.ModuleDict({"norm": nn.LayerNorm(32), "proj": nn.Linear(32, 16)})
    layer = nn.ModuleDict({"router": router, "gate": nn.Linear(32, 16), "gate_proj": nn.Linear(32, 16)})
    replace_frozen_layers(nn.ModuleList([layer]).requires_grad_(False), "fp8")
    assert type(layer["gate_proj"]).__name__ == "FrozenFP8Linear"
    assert type(router["proj"]) is type(layer["gate"]) is nn.Linear


def test_trained_layers_and_zero_3_are_refused(linear):
    with pytest.raises(InputError, match="supports the size of no frozen layer"):
        replace_frozen_layers(nn.ModuleList([linear.requires_grad_(True)]), "fp8")
    linear.requires_grad_(False).weight.ds_id = 0  # the mark of ZeRO-3
    with pytest.raises(InputError, match="but ZeRO-3 splits them"):
        replace_frozen_layers(nn.ModuleList([linear]), "fp8")


@pytest.mark.parametrize(
    ("available", "capability", "problem"),
    [(False, None, "finds none here"), (True, (8, 6), "has 8.6"), (True, (8, 9), None), (True, (9, 0), None)],
)
def test_a_gpu_without_fp8_is_refused(available, capability, problem, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    if problem is None:
        return require_fp8()
    with pytest.raises(InputError, match=problem):
        require_fp8()


def test_divided_weights_and_a_full_fine_tune_are_refused():
    files = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (0, 2, 3)}
    fp8 = SimpleNamespace(precision="fp8", lora={"r": 16})
    assert list(select_unpartitioned_choices("finetune", fp8, files)) == ["zero0", "zero2"]
    with pytest.raises(InputError, match="but zero3 partitions them; set finetune.deepspeed: zero2"):
        select_unpartitioned_choices("finetune", fp8, {"zero3": files["zero3"]})
    with pytest.raises(InputError, match="lora: null trains them all"):
        select_unpartitioned_choices("finetune", SimpleNamespace(precision="fp8", lora=None), files)
