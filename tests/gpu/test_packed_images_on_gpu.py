"""One attention kernel for all images of a batch, on a GPU, compared with attention image by image."""

import pytest
import torch

from dj2mgm.models.vlm.packed_images import _attend_within_images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("head_size", [64, 80])
def test_each_image_attends_to_itself(head_size):
    lengths = [96, 384, 24]
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, sum(lengths), head_size, device="cuda", generator=generator).bfloat16() for _ in range(3)
    )
    boundaries = torch.tensor([0, 96, 480, 504], dtype=torch.int32, device="cuda")
    output, _ = _attend_within_images(None, query, key, value, None, boundaries, 512, head_size**-0.5)
    parts = zip(*(tensor.float().split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    expected = [torch.nn.functional.scaled_dot_product_attention(*part).transpose(1, 2) for part in parts]
    torch.testing.assert_close(output.float(), torch.cat(expected, dim=1), rtol=2e-2, atol=2e-2)
