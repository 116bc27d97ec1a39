"""Numbers of the model on a GPU compared with those on a CPU, up to the number format; skipped without a GPU."""

import pytest
import torch

from dj2mgm.models.greedy_search import GreedySearch, Prompts
from dj2mgm.models.questions import cut_at_stop
from tiny_models import NUM_IMAGE_TOKENS, pixels, tiny_mgm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    model = tiny_mgm()
    image = torch.full((2, NUM_IMAGE_TOKENS), model.config.image_token_id)
    text = torch.randint(20, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    input_ids = torch.cat([image, text], dim=1)
    labels = input_ids.clone()
    labels[:, : NUM_IMAGE_TOKENS + 4] = -100
    return {"input_ids": input_ids, "labels": labels, "pixel_values": pixels(2)}


def loss_and_gradients(model, batch) -> tuple[float, dict[str, torch.Tensor]]:
    device = next(model.parameters()).device
    loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
    loss.backward()
    gradients = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def test_float32_loss_and_gradients_equal_those_on_the_cpu(batch):
    expected_loss, expected_gradients = loss_and_gradients(tiny_mgm(), batch)
    loss, gradients = loss_and_gradients(tiny_mgm().cuda(), batch)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-2 * gradient.norm() + 1e-5, name


def test_bf16_loss_is_close_to_float32_loss(batch):
    expected, _ = loss_and_gradients(tiny_mgm(), batch)
    loss, gradients = loss_and_gradients(tiny_mgm(dtype=torch.bfloat16).cuda(), batch)
    assert loss == pytest.approx(expected, rel=5e-2)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_greedy_answers_on_gpu_equal_those_on_the_cpu(batch):
    prompt = {"input_ids": batch["input_ids"], "pixel_values": batch["pixel_values"]}
    expected = tiny_mgm().eval().generate(**prompt, max_new_tokens=8, do_sample=False)
    model = tiny_mgm().eval().cuda()
    answers = model.generate(**{k: v.cuda() for k, v in prompt.items()}, max_new_tokens=8, do_sample=False)
    assert answers.cpu().tolist() == expected.tolist()


def test_graph_answers_equal_those_of_generate(batch):
    """The second batch replays the graph of the first one; answers end early."""
    model = tiny_mgm().eval().cuda()
    with torch.inference_mode():
        visual = model.model.get_image_features(batch["pixel_values"].cuda())

    def make_inputs(ids, mask, images, reads_images) -> dict:
        inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
        return inputs | ({"visual_tokens": visual[images]} if reads_images else {})

    tokens = [row[:end] for row, end in zip(batch["input_ids"].tolist(), (-1, -5), strict=True)]
    for images in ([0, 1], [1, 1]):
        prompts = Prompts(tokens, [NUM_IMAGE_TOKENS] * 2, images, make_inputs)
        search = GreedySearch(model, [0], 0, 40)
        with torch.inference_mode():
            expected = [cut_at_stop(answer, [0]) for answer in search._generate(prompts).tolist()]
        assert search(prompts) == search(prompts) == expected
        assert search._step.graph and len(expected[0]) > 8
