"""Converted weights compared with a reference implementation in float64 loops."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from dj2mgm.features.fetch.conversion import convert_from_mgm
from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.storage.files import write_json
from published_mgm import PublishedMGM, list_published_shapes, make_random_weights
from tiny_models import NUM_IMAGE_TOKENS, TINY_SIZES, pixels, save_parts, tiny_parts

TEXT = [2, 9, 30, 31]  # before and after the image
QUESTION, ANSWER = [40, 41, 42], [50, 51, 52, 53]


@pytest.fixture(scope="module")
def weights():
    return make_random_weights(list_published_shapes(TINY_SIZES))


@pytest.fixture(scope="module")
def model(weights, tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    (root / "published").mkdir()
    write_json(root / "published/config.json", {})
    save_file(weights, root / "published/model.safetensors")
    save_parts(root)
    convert_from_mgm(root / "published", root / "ours", tiny_parts(root))
    return MGMForConditionalGeneration.from_pretrained(root / "ours").eval()


@pytest.fixture(scope="module")
def plain(weights, model):
    grown = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    return PublishedMGM(grown, TINY_SIZES, model.config.image_token_id)


def conversation(model) -> list[int]:
    return [*TEXT, *[model.config.image_token_id] * NUM_IMAGE_TOKENS, *QUESTION, *ANSWER]


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("seed", [0, 1])
def test_float32_logits_equal_the_published_models(model, plain, seed):
    ids, image = conversation(model), pixels(1, seed)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), pixel_values=image).logits[0]
        expected = plain.logits(ids, image[0])
    relative = difference(logits, expected)
    print(f"logits: {relative:.1e}")
    assert relative < 1e-4


def test_gradients_equal_the_published_model(model, plain):
    ids, image = conversation(model), pixels(1, 2)
    labels = torch.tensor([-100] * (len(ids) - len(ANSWER)) + ANSWER)
    loss = model(input_ids=torch.tensor([ids]), pixel_values=image, labels=labels[None]).loss
    expected = F.cross_entropy(plain.logits(ids, image[0])[:-1], labels[1:])
    assert difference(loss.detach(), expected.detach()) < 1e-4

    pairs = {"model.projector": "model.mm_projector"}
    pairs |= {
        f"model.patch_info_mining.{o}": f"model.vlm_uni_{t}_projector"
        for o, t in (("query", "query"), ("key", "aux"), ("value", "val"))
    }
    names = {
        name: theirs + name.removeprefix(ours)
        for name, _ in model.named_parameters()
        for ours, theirs in pairs.items()
        if name.startswith(ours + ".")
    }
    assert len(names) == 16
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
    theirs = torch.autograd.grad(expected, [plain.w[name] for name in names.values()])
    # a key bias adds the same to all scores of a patch, which the softmax cancels, so its gradients are 0
    moved = [index for index, gradient in enumerate(theirs) if gradient.norm() > 1e-9]
    assert len(moved) == 14
    relative = max(difference(gradients[index], theirs[index]) for index in moved)
    print(f"gradients: {relative:.1e}")
    assert relative < 1e-4


def test_every_used_published_tensor_changes_the_logits(model, plain):
    """Otherwise, the tests would not notice a misplaced tensor."""
    ids, image = conversation(model), pixels(1)
    gradients = torch.autograd.grad(
        plain.logits(ids, image[0]).square().sum(), list(plain.w.values()), allow_unused=True
    )
    still = {name for name, gradient in zip(plain.w, gradients, strict=True) if gradient is None}
    last = f"vision_model.encoder.layers.{TINY_SIZES.clip_layers - 1}."
    assert still == {name for name in plain.w if last in name or "post_layernorm" in name}
