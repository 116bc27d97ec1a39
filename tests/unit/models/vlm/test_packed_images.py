"""Towers that process the patches of all images as one sequence, with arguments from the loader."""

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from dj2mgm.data.formats import build_conversation
from dj2mgm.models.generators import load_family
from dj2mgm.models.vlm.packed_images import TOWER_PREFIX
from tiny_families import save_tiny_family

SIZES = [(48, 40), (90, 60), (33, 77)]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_family(request.param, path)
    return path


@pytest.fixture
def batch(folder, tmp_path):
    """Return a padded batch of conversations about images of several sizes."""
    encoder, items = load_family(folder).make_encoder("", 512), []
    for number, size in enumerate(SIZES):
        path = tmp_path / f"{number}.png"
        Image.effect_noise(size, 90).convert("RGB").save(path)
        items.append(encoder.encode_row(build_conversation(str(number), str(path), "What is shown?", "a red circle")))
    return encoder.batch(items, max(len(item["input_ids"]) for item in items) + 3)


def test_losses_and_gradients_equal_those_of_the_stock_model(folder, batch):
    family, device = load_family(folder), torch.device("cpu")
    ours = family.load(torch.float32, "sdpa")
    loss = ours(**family.prepare_inputs(batch, device)).loss
    loss.backward()
    stock = AutoModelForImageTextToText.from_pretrained(folder)
    plain = {name: value for name, value in batch.items() if not name.startswith(TOWER_PREFIX)}
    del plain["position_ids"], plain["answer_positions"]
    expected = stock(**plain, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
    assert gradients
    for name, parameter in ours.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_tower_does_not_compute_with_the_patch_grid(folder, batch):
    """A computation would make the host wait for the GPU; it fails on a grid without values."""
    family = load_family(folder)
    model = family.load(torch.float32, "sdpa")
    tower = model.get_encoder(modality="image")
    tower.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"grid_thw": kwargs["grid_thw"].to("meta")}), with_kwargs=True
    )
    model.model.get_rope_index = None
    assert torch.isfinite(model(**family.prepare_inputs(batch, torch.device("cpu"))).loss)
    without = {name: value for name, value in batch.items() if not name.startswith(TOWER_PREFIX)}
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**family.prepare_inputs(without, torch.device("cpu")))


def test_arguments_of_a_batch_do_not_affect_the_next(folder, batch):
    family = load_family(folder)
    model = family.load(torch.float32, "sdpa")
    inputs = family.prepare_inputs(batch, torch.device("cpu"))
    first = model(**inputs).loss
    plain = {name: value for name, value in inputs.items() if not name.startswith(TOWER_PREFIX)}
    torch.testing.assert_close(model(**plain).loss, first)
