"""Frozen layers in 4 bits: results, stored tensors, refused sizes, and a stage compared with restored weights."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchao.quantization import to_nf4
from transformers import AutoModelForImageTextToText

import tiny_families
from dj2mgm.data.formats import build_conversation
from dj2mgm.errors import InputError
from dj2mgm.planning.architecture import MGMArchitecture
from dj2mgm.planning.prediction import Machine, TrainingPlan, ZeroConfig, predict
from dj2mgm.planning.step import Workload, count_parameters
from dj2mgm.settings.training_stages import LoraSettings, read_deepspeed
from dj2mgm.storage.files import read_jsonl, write_jsonl
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.frozen_layers import FrozenNF4Linear, replace_frozen_layers
from tiny_models import mgm_config, save_image
from trained_stages import build_flags

LEVELS = to_nf4(torch.eye(256)).nf4


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 128).requires_grad_(False)


def test_output_and_gradient_equal_the_restored_weights(linear):
    x, gradient = torch.randn(2, 5, 256, requires_grad=True), torch.randn(2, 5, 128)
    weight = to_nf4(linear.weight).get_original_weight()
    output = FrozenNF4Linear(linear)(x)
    output.backward(gradient)
    torch.testing.assert_close(output, x @ weight.T + linear.bias)
    torch.testing.assert_close(x.grad, gradient @ weight)


def test_a_weight_becomes_the_nearest_level_of_its_block(linear):
    restored = FrozenNF4Linear(linear)(torch.eye(256)) - linear.bias
    blocks, restored_blocks = linear.weight.reshape(-1, 64), restored.T.reshape(-1, 64)
    greatest = blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks.unsqueeze(-1) - greatest.unsqueeze(-1) * LEVELS).abs().amin(dim=-1)
    # scales of blocks are also rounded, by less than a hundredth of the largest one
    assert ((blocks - restored_blocks).abs() <= nearest + 0.01 * greatest.max()).all()


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_store_codes_for_the_backward_pass(linear, backend):
    """Both backends store the same tensors, but Inductor also compiles C++ for 10 s."""
    sizes = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    compiled = torch.compile(FrozenNF4Linear(linear).forward, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        compiled(torch.randn(3, 256, requires_grad=True))
    assert 0 < sum(sizes) < linear.weight.numel()  # one byte per weight would be twice the size of its code


def test_layers_that_blocks_do_not_divide_are_not_replaced():
    layers = nn.ModuleDict({"even": nn.Linear(128, 128), "odd": nn.Linear(128, 64)}).requires_grad_(False)
    replace_frozen_layers(layers, "nf4")
    assert type(layers["even"]) is FrozenNF4Linear and type(layers["odd"]) is nn.Linear
    with pytest.raises(InputError, match="precision: nf4 supports the size of no frozen layer"):
        replace_frozen_layers(nn.ModuleDict({"odd": layers["odd"]}), "nf4")


@pytest.mark.slow
def test_a_stage_in_4_bits_equals_one_with_restored_weights(forks, tmp_path, monkeypatch):
    wider = {"hidden_size": 128, "intermediate_size": 256}
    monkeypatch.setattr(tiny_families, "TEXT", tiny_families.TEXT | wider)
    tiny_families.save_tiny_family("llava", tmp_path / "model")
    tiny_families.save_tiny_family("llava", tmp_path / "restored")
    restored = AutoModelForImageTextToText.from_pretrained(tmp_path / "restored")
    layers = [m for m in restored.get_decoder().layers.modules() if type(m) is nn.Linear]
    in_4_bits = [layer.weight for layer in layers if FrozenNF4Linear.supports(layer.weight)]
    assert len(in_4_bits) == 10 and len(layers) == 14  # keys and values (64 × 128) have too few blocks
    with torch.no_grad():
        for weight in in_4_bits:
            weight.copy_(to_nf4(weight.detach()).get_original_weight())
    restored.save_pretrained(tmp_path / "restored")

    image = str(save_image(tmp_path / "a.png"))
    rows = [build_conversation(str(n), image, "Which color is it?", "blue " * n) for n in range(1, 9)]
    write_jsonl(tmp_path / "data.jsonl", rows)
    settings = {"deepspeed": read_deepspeed("zero2", "finetune"), "max_length": 512, "max_steps": 4, "epochs": 4}
    settings |= {"global_batch_size": 4, "gradient_accumulation_steps": 4, "projector_learning_rate": None}
    settings["lora"] = {"r": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "up_proj"]}
    for model, precision in (("model", "nf4"), ("restored", "fp32")):
        command = build_flags(tmp_path / model, tmp_path / precision, "LoRA", **settings | {"precision": precision})
        command |= {"--data": tmp_path / "data.jsonl", "--model": tmp_path / model}
        del command["--projector"]
        ended = forks.run("finetune.py", command)
        assert ended.ok, ended.printed[-3000:]
    losses = [[row["loss"] for row in read_jsonl(tmp_path / p / "metrics.jsonl")] for p in ("nf4", "fp32")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    adapters = [load_file(tmp_path / p / "adapter/adapter_model.safetensors") for p in ("nf4", "fp32")]
    torch.testing.assert_close(*adapters, rtol=1e-3, atol=1e-5)


def test_the_plan_counts_codes_and_scales_instead_of_weights():
    config = mgm_config("gemma")
    config.text_config.update({"hidden_size": 128, "intermediate_size": 256})
    machine = Machine(1, 24.0, 64.0)
    zero = ZeroConfig.from_deepspeed(complete_deepspeed_config(read_deepspeed("zero2", ""), 128))
    plan = TrainingPlan("zero2", zero, 0, 1, 4)
    lora = LoraSettings(r=4, alpha=8, dropout=0.0, targets=["q_proj"])
    cases = [Workload(MGMArchitecture("a", config), "lora", 40, 12, lora=lora, nf4=nf4) for nf4 in (False, True)]
    whole, in_4_bits = (predict(case, plan, machine).gpu for case in cases)
    elements = sum(count_parameters(cases[1]).in_4_bits)
    assert elements > 0 and count_parameters(cases[0]).in_4_bits == ()
    saved = (whole["weights"] - in_4_bits["weights"]) * 2**30
    assert saved == pytest.approx(elements * (2 - 0.5 - 1 / 64), rel=1e-3)
    assert in_4_bits["a whole layer"] * 2**30 == pytest.approx(2 * 128 * 256, rel=1e-3)
