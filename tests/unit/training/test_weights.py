"""Trainable parameters, saved weights, and checks of trained weights."""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from dj2mgm.errors import InputError
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.mgm.mgm_generator import load_trained
from dj2mgm.models.trained_weights import find_projector_parameters, load_projector, read_full_shapes
from dj2mgm.models.tuning import find_projections, wrap_with_lora
from dj2mgm.runs.stage_settings import PROJECTIONS
from dj2mgm.settings.training_stages import LoraSettings
from dj2mgm.training.outputs import BrokenWeightsError, check_weights, gather_weights, save_projector, save_weights
from finetune import prepare_stage_2, save_adapter_and_projector, save_language_model_and_projector
from pretrain import train_projector_only
from tiny_models import randomize, tiny_mgm

NAMES = {
    f"patch_info_mining.{part}.{layer}.{kind}"
    for part in ("query", "key", "value")
    for layer in "01"
    for kind in ("weight", "bias")
} | {f"projector.{layer}.{kind}" for layer in "02" for kind in ("weight", "bias")}
LORA = LoraSettings(r=4, alpha=8, dropout=0.0, targets=["q_proj", "v_proj"])


def make_weights() -> dict[str, torch.Tensor]:
    return {
        "projector.0.weight": torch.ones(3, 4),
        "a.lora_A.weight": torch.ones(2, 4),
        "a.lora_B.weight": torch.ones(4, 2),
        "b.lora_B.weight": torch.zeros(4, 2),
    }


SHAPES = {name: tensor.shape for name, tensor in make_weights().items()}


def refusal(**changes: torch.Tensor) -> str:
    weights = make_weights() | {name.replace("_dot_", "."): tensor for name, tensor in changes.items()}
    with pytest.raises(BrokenWeightsError) as error:
        check_weights({name: tensor for name, tensor in weights.items() if tensor is not None}, SHAPES, steps=2)
    return str(error.value)


def test_valid_weights_and_one_changed_lora_b_suffice():
    check_weights(make_weights(), SHAPES, steps=2)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "tensor projector.0.weight is missing (1 in all)"),
        (torch.empty(0), "tensor projector.0.weight has shape (0,) instead of (3, 4)"),
        (torch.ones(4, 3), "tensor projector.0.weight has shape (4, 3) instead of (3, 4)"),
        (torch.full((3, 4), torch.nan), "tensor projector.0.weight holds values that are not finite"),
        (torch.tensor([[1.0] * 4, [1.0] * 4, [1.0, 1.0, 1.0, -torch.inf]]), "not finite"),
    ],
)
def test_missing_misshapen_and_non_finite_tensors_are_named(tensor, message):
    assert message in refusal(projector_dot_0_dot_weight=tensor)


def test_an_unchanged_lora_is_refused():
    assert "every lora_B matrix is zero" in refusal(a_dot_lora_B_dot_weight=torch.zeros(4, 2))


def test_a_new_lora_adapter_counts_as_unchanged(tmp_path):
    model = tiny_mgm()
    save_weights(gather_weights(find_projector_parameters(model)), tmp_path / "projector.safetensors")
    wrapped = prepare_stage_2(model, MGMFamily.find_parts(model), LORA, tmp_path / "projector.safetensors")
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    with pytest.raises(BrokenWeightsError, match="every lora_B matrix is zero"):
        check_weights(gather_weights(trained), read_full_shapes(trained), steps=2)
    randomize(wrapped.base_model.model.model.language_model)
    check_weights(gather_weights(trained), read_full_shapes(trained), steps=2)


def test_projector_parameters_keep_their_names_in_wrappers(tmp_path):
    model = tiny_mgm()
    assert set(find_projector_parameters(model)) == NAMES == set(find_projector_parameters(model.model))
    save_weights(gather_weights(find_projector_parameters(model)), tmp_path / "projector.safetensors")
    assert (
        set(
            find_projector_parameters(
                prepare_stage_2(model, MGMFamily.find_parts(model), LORA, tmp_path / "projector.safetensors")
            )
        )
        == NAMES
    )


def test_stage_1_trains_only_projector_and_mining_from_seed(tmp_path):
    models = []
    for _ in range(2):
        model = tiny_mgm()
        torch.manual_seed(7)
        models.append(train_projector_only(model, MGMFamily.find_parts(model)))
    trained = {name for name, p in models[0].named_parameters() if p.requires_grad}
    assert trained == {f"model.{name}" for name in NAMES}
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)
    before = find_projector_parameters(tiny_mgm())
    assert all(
        not torch.equal(parameter, before[name])
        for name, parameter in find_projector_parameters(models[0]).items()
        if name.endswith("weight") and parameter.dim() == 2
    )


def test_stage_2_trains_only_lora_and_the_projector(tmp_path):
    model = tiny_mgm()
    save_weights(gather_weights(find_projector_parameters(model)), tmp_path / "projector.safetensors")
    wrapped = prepare_stage_2(model, MGMFamily.find_parts(model), LORA, tmp_path / "projector.safetensors")
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    lora = {name for name in trained if "lora_" in name}
    assert all(any(name.endswith(part) for part in NAMES) for name in trained - lora)
    assert len(trained - lora) == len(NAMES)
    assert len(lora) == 2 * 2 * 2  # A and B for two projections in two layers
    assert all(".language_model.layers." in name for name in lora)  # the projections of CLIP have the same names


def test_an_adapter_replaces_an_earlier_full_fine_tuning(tmp_path):
    model = tiny_mgm()
    save_weights(gather_weights(find_projector_parameters(model)), tmp_path / "projector.safetensors")
    wrapped = prepare_stage_2(model, MGMFamily.find_parts(model), LORA, tmp_path / "projector.safetensors")
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune/language_model.safetensors").touch()
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    save_adapter_and_projector(wrapped, gather_weights(trained), tmp_path / "finetune")
    assert {path.name for path in (tmp_path / "finetune").iterdir()} == {"projector.safetensors", "adapter"}


def test_full_fine_tuning_is_saved_and_loaded(tmp_path):
    model = tiny_mgm()
    model.save_pretrained(tmp_path / "base")
    save_weights(gather_weights(find_projector_parameters(model)), tmp_path / "projector.safetensors")
    model = prepare_stage_2(model, MGMFamily.find_parts(model), None, tmp_path / "projector.safetensors")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, _ in model.named_parameters()} - set(trained)
    assert frozen and all(name.startswith(("model.vision_tower.", "model.vision_tower_aux.")) for name in frozen)
    randomize(model.model.language_model, seed=9)
    (tmp_path / "finetune/adapter").mkdir(parents=True)  # adapter of an earlier run with LoRA, which must not be loaded
    save_language_model_and_projector(model, gather_weights(trained), tmp_path / "finetune")
    files = {path.name for path in (tmp_path / "finetune").iterdir()}
    assert files == {"projector.safetensors", "language_model.safetensors"}
    loaded = dict(load_trained(tmp_path / "base", tmp_path / "finetune", torch.float32).named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def test_a_saved_projector_loads_into_another_model(tmp_path):
    source, target = tiny_mgm(), tiny_mgm()
    randomize(source.model.projector, seed=5)
    randomize(source.model.patch_info_mining, seed=6)
    weights = {name: p for name, p in source.named_parameters() if p.requires_grad and name[6:] in NAMES}
    save_projector(source, gather_weights(weights), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"projector.safetensors"}
    load_projector(target, tmp_path / "projector.safetensors")
    expected = find_projector_parameters(source)
    for name, parameter in find_projector_parameters(target).items():
        assert torch.equal(parameter, expected[name])
    assert torch.equal(target.lm_head.weight, tiny_mgm().lm_head.weight)


def test_projector_of_another_model_is_refused_without_changes(tmp_path):
    model = tiny_mgm()
    weights = gather_weights(find_projector_parameters(model))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    incomplete = {name: tensor for name, tensor in weights.items() if name != "projector.2.bias"}
    misshapen = weights | {"projector.2.bias": torch.zeros(7)}
    for number, wrong in enumerate((incomplete, misshapen, weights | {"extra": torch.zeros(1)})):
        path = tmp_path / f"{number}.safetensors"
        save_weights(wrong, path)
        with pytest.raises(InputError, match="does not fit this model; .*run its stage again"):
            load_projector(model, path)
    assert all(torch.equal(parameter, before[name]) for name, parameter in find_projector_parameters(model).items())


def test_saved_weights_are_safetensors_with_every_value(tmp_path):
    weights = {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16()}
    save_weights(weights, tmp_path / "new" / "w.safetensors")
    again = load_file(tmp_path / "new" / "w.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


def test_gathered_weights_are_copies():
    model = tiny_mgm()
    weights = gather_weights(find_projector_parameters(model))
    weights["projector.0.bias"] += 1
    assert not torch.equal(weights["projector.0.bias"], model.model.projector[0].bias)


@pytest.mark.parametrize("family", ["gemma", "qwen"])
def test_known_projections_equal_those_of_the_models(family):
    model = tiny_mgm(family)
    assert set(find_projections(MGMFamily.find_parts(model).decoder)) == set(
        PROJECTIONS[model.config.text_config.model_type]
    )
    with pytest.raises(InputError, match="no projection 'q_porj'; known are q_proj, k_proj"):
        wrap_with_lora(
            model, LORA.model_copy(update={"targets": ["q_proj", "q_porj"]}), MGMFamily.find_parts(model).decoder
        )


def test_lora_on_all_layers_excludes_the_towers():
    model = tiny_mgm("gemma")
    decoder = MGMFamily.find_parts(model).decoder
    linear = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    wrapped = wrap_with_lora(model, LORA.model_copy(update={"targets": "all"}), decoder)
    adapted = [module.base_layer for module in wrapped.modules() if isinstance(module, LoraLayer)]
    assert [id(module) for module in adapted] == [id(module) for module in linear]


def test_loras_b_can_be_zero_after_one_step():
    weights = {"x.lora_B.weight": torch.zeros(2, 3)}
    shapes = {"x.lora_B.weight": torch.Size([2, 3])}
    check_weights(weights, shapes, steps=1)
    with pytest.raises(BrokenWeightsError, match="nothing was trained"):
        check_weights(weights, shapes, steps=2)
