"""Patch info mining and visual features compared with slow computations, patch by patch."""

import math

import pytest
import torch

from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.modeling_mgm import PatchInfoMining
from published_mgm import MGM_2B
from tiny_models import (
    IMAGE_SIDE,
    PATCHES,
    mgm_config,
    pixels,
    randomize,
    text_config,
    tiny_mgm,
    vision_aux_config,
    vision_config,
)


def normalised_linear(sequential, vector: torch.Tensor) -> torch.Tensor:
    """Compute LayerNorm and linear layer of one vector."""
    norm, linear = sequential
    centred = vector - vector.mean()
    scaled = centred / torch.sqrt((centred**2).mean() + norm.eps)
    return linear.weight @ (scaled * norm.weight + norm.bias) + linear.bias


def mined_patch_by_patch(mining, patches: torch.Tensor, sub_patches: torch.Tensor) -> torch.Tensor:
    images = []
    for b in range(patches.shape[0]):
        mined = []
        for n in range(patches.shape[1]):
            query = normalised_linear(mining.query, patches[b, n])
            keys = [normalised_linear(mining.key, sub) for sub in sub_patches[b, n]]
            values = [normalised_linear(mining.value, sub) for sub in sub_patches[b, n]]
            weights = [torch.exp(query @ key / math.sqrt(len(query))) for key in keys]
            mined.append(sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights))
        images.append(torch.stack(mined))
    return torch.stack(images)


def bilinear(stage: torch.Tensor, size: int, row: int, column: int) -> torch.Tensor:
    """Interpolate the value at a pixel of the (size, size) image: (B, C, h, h) → (B, C)."""
    side = stage.shape[-1]

    def neighbours(index: int) -> list[tuple[int, float]]:
        position = max(0.0, (index + 0.5) * side / size - 0.5)
        low = int(position)
        return [(low, 1 - (position - low)), (min(low + 1, side - 1), position - low)]

    return sum(wr * wc * stage[:, :, r, c] for r, wr in neighbours(row) for c, wc in neighbours(column))


def sub_patches_one_by_one(stages, patches_per_side: int) -> torch.Tensor:
    """Group all stages at the first one's resolution by patch: [(B, C_s, h_s, h_s)] → (B, N, M², C')."""
    size = stages[0].shape[-1]
    m = size // patches_per_side

    def sub_patch(patch: int, sub: int) -> torch.Tensor:
        row = patch // patches_per_side * m + sub // m
        column = patch % patches_per_side * m + sub % m
        return torch.cat([bilinear(stage, size, row, column) for stage in stages], dim=-1)

    patches = range(patches_per_side**2)
    return torch.stack([torch.stack([sub_patch(n, sub) for sub in range(m**2)], dim=1) for n in patches], dim=1)


def mined_one_by_one(mining, patches: torch.Tensor, stages) -> torch.Tensor:
    return mined_patch_by_patch(mining, patches, sub_patches_one_by_one(stages, math.isqrt(patches.shape[1])))


@pytest.fixture
def mining():
    """Return mining of four patches from stages with 8, 4, 3 and 1 cells per side (even, odd, fewer than patches)."""
    torch.manual_seed(1)
    module = PatchInfoMining(6, 14).double()
    randomize(module)
    patches = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    shapes = [(3, 8), (4, 4), (2, 3), (5, 1)]
    stages = [torch.randn(2, c, side, side, dtype=torch.float64, requires_grad=True) for c, side in shapes]
    return module, patches, stages


def test_gradients_of_mining_equal_those_of_the_loop(mining):
    module, patches, stages = mining
    sources = [patches, *stages, *module.parameters()]
    weight = torch.randn(2, 4, 6, dtype=torch.float64)
    fast = torch.autograd.grad((module(patches, *stages) * weight).sum(), sources)
    slow = torch.autograd.grad((mined_one_by_one(module, patches, stages) * weight).sum(), sources)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    reached = [gradient.abs().max() > 1e-3 for gradient in fast]
    assert sum(reached) == len(sources) - 2  # the softmax cancels the two biases of the key


def test_patch_attends_to_its_own_cells_only(mining):
    module, patches, stages = mining
    before = module(patches, *stages)
    finest = stages[0].detach().clone()
    finest[0, :, 5, 2] *= 2  # in the lower left quarter
    changed = (module(patches, finest, *stages[1:]) - before).abs().amax(dim=-1) > 1e-9
    assert changed.nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_mining_is_precise_for_features_far_from_zero(mining, dtype, most):
    """Compare with a loop over patches and sub-patches on the same features in the same dtype."""
    module, patches, stages = mining
    for mean in (0, 3, 30):  # in standard deviations
        rounded = [(stage.detach() + mean).to(dtype) for stage in stages]
        exact = mined_one_by_one(module.double(), patches, [stage.double() for stage in rounded])
        mined = module.to(dtype)(patches.detach().to(dtype), *rounded)
        assert mined.dtype == dtype and (mined.double() - exact).norm() < most * exact.norm()


def test_mining_can_be_trained_after_inference(mining):
    module, patches, stages = mining
    wide = [stage.detach().repeat(1, 1, 3, 3) for stage in stages]  # sizes without cached windows
    many = torch.randn(2, 36, 6, dtype=torch.float64)
    with torch.inference_mode():
        module(many, *wide)
    module(many, *wide).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.fixture(scope="module")
def model():
    return tiny_mgm(dtype=torch.float64).model


def test_stages_equal_transformers_convnext(model):
    images = pixels(2, dtype=torch.float64)
    with torch.inference_mode():
        ours = model.compute_stage_features(images)
        # transformers' own list; the first entry is the embedding
        stages = model.vision_tower_aux(images, output_hidden_states=True).hidden_states[1:]
    assert [stage.shape[1] for stage in ours] == [8, 12, 16, 24]
    assert ours[0].shape[-1] == IMAGE_SIDE // 4
    for result, expected in zip(ours, stages, strict=True):
        torch.testing.assert_close(result, expected)


def test_clip_encodes_the_small_image_per_patch(model):
    # a constant image is equal at any resolution
    flat = torch.full((1, 3, IMAGE_SIDE, IMAGE_SIDE), 0.7, dtype=torch.float64)
    small = torch.full((1, 3, 8 * PATCHES, 8 * PATCHES), 0.7, dtype=torch.float64)
    with torch.inference_mode():
        features = model.compute_clip_features(flat)
        layers = model.vision_tower(small, output_hidden_states=True).hidden_states
    assert features.shape == (1, PATCHES**2, 24)
    torch.testing.assert_close(features, layers[len(layers) - 2][:, 1:], rtol=1e-5, atol=1e-6)


def test_images_are_scaled_down_in_float32():
    model, images = tiny_mgm(dtype=torch.bfloat16).model, pixels(2)
    low = torch.nn.functional.interpolate(images, size=8 * PATCHES, mode="bilinear", align_corners=False)
    with torch.inference_mode():
        layers = model.vision_tower(low.bfloat16(), output_hidden_states=True).hidden_states
        assert torch.equal(model.compute_clip_features(images), layers[-2][:, 1:])
        assert not torch.equal(model.compute_clip_features(images.bfloat16()), layers[-2][:, 1:])
        assert model.get_image_features(images).dtype == torch.bfloat16


def test_visual_tokens_are_projected_sums_of_features(model):
    images = pixels(2, dtype=torch.float64)
    with torch.inference_mode():
        tokens = model.get_image_features(images)
        patches, stages = model.compute_clip_features(images), model.compute_stage_features(images)
        first, _, second = model.projector
        inner = (patches + mined_one_by_one(model.patch_info_mining, patches, stages)) @ first.weight.T + first.bias
        gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        torch.testing.assert_close(tokens, gelu @ second.weight.T + second.bias, rtol=1e-8, atol=1e-8)


def test_fine_details_change_the_visual_tokens(model):
    """A checkerboard of single pixels disappears at CLIP's half resolution."""
    flat = torch.zeros(1, 3, IMAGE_SIDE, IMAGE_SIDE, dtype=torch.float64)
    index = torch.arange(IMAGE_SIDE)
    checkers = flat + ((index[:, None] + index) % 2 * 2 - 1)
    with torch.inference_mode():
        torch.testing.assert_close(model.compute_clip_features(checkers), model.compute_clip_features(flat))
        assert (model.get_image_features(checkers) - model.get_image_features(flat)).abs().max() > 1e-3


def test_configuration_refuses_mismatched_grids():
    config = mgm_config()
    assert (config.patches_per_side, config.num_image_tokens, config.sub_patches_per_side) == (4, 16, 4)
    assert config.aux_channels == 60
    parts = {
        "text_config": text_config("gemma"),
        "vision_config": vision_config(),
        "vision_aux_config": vision_aux_config(),
    }
    for side in (66, 72):  # not a multiple of ConvNeXt's patch; 18 features per side for 4 patches
        with pytest.raises(ValueError, match=f"image_size_aux {side}.*multiple"):
            MGMConfig(**parts, image_size_aux=side)


def test_the_sizes_of_mgm_2b_match_the_paper():
    config = mgm_config(sizes=MGM_2B, image_side=768)
    assert (config.num_image_tokens, config.sub_patches_per_side**2, config.aux_channels) == (576, 64, 2880)
