"""Saving, loading and assembling of models, from safetensors only."""

import json
import socket

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionModel,
    ConvNextModel,
)

from dj2mgm.errors import InputError
from dj2mgm.models.mgm import MGMConfig, MGMForConditionalGeneration, MGMProcessor
from dj2mgm.models.mgm.assemble import assemble
from tiny_models import (
    IMAGE_SIDE,
    NUM_IMAGE_TOKENS,
    pixels,
    randomize,
    save_image,
    save_parts,
    text_config,
    tiny_mgm,
    tiny_parts,
    tiny_processor,
    vision_config,
)

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def logits(model, images: int = 1) -> torch.Tensor:
    inputs = tiny_processor().encode_prompts(["<image>\nHow many objects are there?"] * images)
    with torch.inference_mode():
        return model(**inputs, pixel_values=pixels(images, dtype=model.dtype)).logits


def assert_same_weights(model, reference) -> None:
    """Assert that weights and buffers are equal bit for bit."""
    weights, expected = model.state_dict(), reference.state_dict()
    assert weights.keys() == expected.keys()
    assert all(
        weights[name].dtype == expected[name].dtype and torch.equal(weights[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize(("family", "tied"), [("gemma", True), ("qwen2", False)])
def test_auto_classes_load_a_saved_model_with_equal_logits(tmp_path, family, tied):
    """Only safetensors are written, and each weight once."""
    model = tiny_mgm(family)
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again) is MGMForConditionalGeneration and type(AutoConfig.from_pretrained(tmp_path)) is MGMConfig
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    torch.testing.assert_close(logits(again.eval()), logits(model), rtol=1e-5, atol=1e-5)  # weights are copied
    assert_same_weights(again, model)


def test_a_saved_configuration_keeps_every_part(tmp_path):
    config = tiny_mgm().config
    config.save_pretrained(tmp_path)
    again = MGMConfig.from_pretrained(tmp_path)
    parts = ("text_config", "vision_config", "vision_aux_config")
    assert [getattr(again, part).model_type for part in parts] == ["gemma", "clip_vision_model", "convnext"]
    for part in parts:
        assert getattr(again, part).to_dict() == getattr(config, part).to_dict()
    assert (again.image_size_aux, again.image_token_id) == (config.image_size_aux, config.image_token_id)
    assert not json.loads((tmp_path / "config.json").read_text()).get("auto_map")  # without remote code


def test_a_saved_processor_loads_with_equal_outputs(tmp_path):
    processor = tiny_processor()
    processor.save_pretrained(tmp_path / "p")
    again = AutoProcessor.from_pretrained(tmp_path / "p")
    assert type(again) is MGMProcessor
    assert (again.image_token_id, again.num_image_tokens) == (processor.image_token_id, NUM_IMAGE_TOKENS)
    segments = [("<image>\nHow many?", False), ("two\n", True)]
    assert again.encode(segments) == processor.encode(segments)
    image = Image.open(save_image(tmp_path / "a.png")).convert("RGB")
    assert torch.equal(again.build_pixel_values([image]), processor.build_pixel_values([image]))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    save_parts(root, ("gemma", "qwen2"))
    return root


def assembled(parts, family: str = "gemma", **changes):
    return assemble(**tiny_parts(parts, family) | {"dtype": "float32"} | changes)


@pytest.mark.parametrize("family", ["gemma", "qwen2"])
def test_an_assembled_model_has_the_weights_of_its_parts(parts, family):
    model, processor = assembled(parts, family)
    sources = (
        (model.model.vision_tower, CLIPVisionModel.from_pretrained(parts / "clip")),
        (model.model.vision_tower_aux, ConvNextModel.from_pretrained(parts / "convnext")),
        (model.model.language_model, AutoModelForCausalLM.from_pretrained(parts / family).model),
    )
    for module, source in sources:
        weights, expected = module.state_dict(), source.state_dict()
        assert weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in expected)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert processor.num_image_tokens == NUM_IMAGE_TOKENS
    assert model.config.image_token_id == processor.image_token_id


@pytest.mark.parametrize("family", ["gemma", "qwen2"])
def test_assembled_model_has_its_language_models_text_logits(parts, family, tmp_path):
    model, processor = assembled(parts, family)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again = MGMForConditionalGeneration.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(model.eval()), rtol=1e-5, atol=1e-5)
    assert_same_weights(again, model)
    assert not [path for pattern in PICKLES for path in tmp_path.rglob(pattern)]
    ids = torch.randint(10, 200, (1, 7))
    with torch.inference_mode():
        text = AutoModelForCausalLM.from_pretrained(parts / family).eval()(input_ids=ids).logits
        torch.testing.assert_close(again(input_ids=ids).logits, text)


def test_the_image_processor_is_clips_at_high_resolution(parts, tmp_path):
    _, processor = assembled(parts)
    image = Image.new("RGB", (50, 20), (255, 0, 0))
    values = processor.build_pixel_values([image])[0]
    assert values.shape == (3, IMAGE_SIDE, IMAGE_SIDE)
    mean, std = (torch.tensor(v) for v in (processor.image_processor.image_mean, processor.image_processor.image_std))
    centre = values[:, IMAGE_SIDE // 2, IMAGE_SIDE // 2] * std + mean
    torch.testing.assert_close(centre, torch.tensor([1.0, 0.0, 0.0]), atol=1e-3, rtol=0)
    assert values[:, 2].abs().max() < 0.05  # padded with the mean color


def test_new_layers_depend_on_the_seed(parts):
    def weights(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model, _ = assembled(parts)
        return [*model.model.projector.parameters(), *model.model.patch_info_mining.parameters()]

    first, same, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])


def test_dtype_applies_to_every_weight(parts):
    model, _ = assembled(parts, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_image_token_missing_in_the_tokenizer_is_refused(parts):
    for token in ("<unused12345>", "no token at all"):
        with pytest.raises(InputError, match=f"image_token '{token}' is missing in the tokenizer of .*; name a token"):
            assembled(parts, image_token=token)


def test_a_complete_clip_can_be_the_vision_tower(parts, tmp_path):
    text = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = CLIPModel(CLIPConfig(vision_config=vision_config().to_dict(), text_config=text, projection_dim=8))
    randomize(whole)
    whole.save_pretrained(tmp_path)
    CLIPImageProcessorPil.from_pretrained(parts / "clip").save_pretrained(tmp_path)
    model, _ = assembled(parts, vision_tower=str(tmp_path))
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(
            model.model.vision_tower.eval()(images).last_hidden_state,
            whole.eval().vision_model(images).last_hidden_state,
        )


def test_pickled_weights_are_refused_with_the_conversion(parts, tmp_path):
    source = ConvNextModel.from_pretrained(parts / "convnext")
    source.config.save_pretrained(tmp_path)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    remedy = "vision_tower_aux: .* safetensors; convert its weights: .*convert_mgm_checkpoint.py {} .* <new folder>"
    with pytest.raises(InputError, match=remedy.format("safetensors")):
        assembled(parts, vision_tower_aux=str(tmp_path))
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "open_clip_pytorch_model.bin")
    with pytest.raises(InputError, match=remedy.format("convnext")):
        assembled(parts, vision_tower_aux=str(tmp_path))


@pytest.mark.parametrize("part", ["language_model", "vision_tower", "vision_tower_aux"])
def test_message_about_a_missing_folder_names_its_key(parts, part):
    with pytest.raises(InputError, match=f"^{part}: the folder no/such/folder is missing; docs/models.md"):
        assembled(parts, **{part: "no/such/folder"})


def test_local_folders_need_no_network(parts, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assembled(parts)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_gemma_uses_tanh_gelu_for_any_config(activation):
    """Gemma 1's config.json contains "gelu"; see huggingface/transformers#29402."""
    values = text_config("gemma").to_dict() | {"hidden_act": activation, "hidden_activation": None}
    mlp = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).model.layers[0].mlp
    x = torch.linspace(-4, 4, 201)
    tanh = torch.nn.functional.gelu(x, approximate="tanh")
    assert torch.equal(mlp.act_fn(x), tanh) and not torch.equal(tanh, torch.nn.functional.gelu(x))
