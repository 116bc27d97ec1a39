"""Generation with MGM: cache, padding, stop tokens, learned answers, and images that processes decode."""

import random
import time

import numpy as np
import pytest
import torch

from dj2mgm.data.formats import build_conversation
from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.models.mgm.mgm_family import MGMEncoder
from dj2mgm.models.mgm.mgm_generator import MGMGenerator, fill_in_order
from tiny_models import NUM_IMAGE_TOKENS, mgm_config, pixels, save_image, tiny_mgm, tiny_processor, tiny_qwen_processor

STEPS = 8


@pytest.fixture(scope="module", params=["gemma", "qwen2"])
def model(request):
    model = tiny_mgm(request.param, torch.float64)  # without near ties
    model.generation_config.eos_token_id = None
    return model


def prompts(count: int = 2) -> dict[str, torch.Tensor]:
    texts = ["<image>\nWhat color is the circle?", "<image> two", "How red is <image>"][:count]
    return tiny_processor().encode_prompts(texts)


def generate(model, inputs: dict, images: torch.Tensor, **options) -> torch.Tensor:
    output = model.generate(**inputs, pixel_values=images, max_new_tokens=STEPS, do_sample=False, **options)
    return output[:, inputs["input_ids"].shape[1] :]


def greedy(model, input_ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Decode one row without padding and without a cache."""
    start = input_ids.shape[1]
    with torch.inference_mode():
        for _ in range(STEPS):
            logits = model(input_ids=input_ids, pixel_values=images).logits
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
    return input_ids[:, start:]


def test_generation_equals_the_argmax_of_full_passes(model):
    inputs, images = prompts(1), pixels(1, dtype=torch.float64)
    expected = greedy(model, inputs["input_ids"], images)
    assert generate(model, inputs, images).tolist() == expected.tolist()
    assert generate(model, inputs, images, use_cache=False).tolist() == expected.tolist()


def test_answers_do_not_depend_on_padding_and_batch(model):
    inputs, images = prompts(3), pixels(3, dtype=torch.float64)
    together = generate(model, inputs, images)
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == 3
    for row, length in enumerate(lengths):
        alone = inputs["input_ids"][row : row + 1, -length:]
        assert together[row].tolist() == greedy(model, alone, images[row : row + 1])[0].tolist()


def test_the_image_is_encoded_once_and_changes_answers(model):
    inputs, images = prompts(1), pixels(1, dtype=torch.float64)
    calls = []
    hook = model.model.vision_tower.embeddings.register_forward_hook(lambda *_: calls.append(1))
    generate(model, inputs, images)
    hook.remove()
    assert len(calls) == 1
    with torch.inference_mode():
        own = model(**inputs, pixel_values=images).logits[:, -1]
        other = model(**inputs, pixel_values=pixels(1, seed=9, dtype=torch.float64)).logits[:, -1]
    assert (own - other).abs().max() > 1e-3


def test_generation_ends_at_a_stop_token(model):
    inputs, images = prompts(1), pixels(1, dtype=torch.float64)
    answer = generate(model, inputs, images)[0].tolist()
    stop = answer[2]
    stopped = generate(model, inputs, images, eos_token_id=[stop])[0].tolist()
    assert stopped == answer[: answer.index(stop) + 1]


def test_logits_to_keep_keeps_the_last_positions(model):
    inputs, images = prompts(2), pixels(2, dtype=torch.float64)
    with torch.inference_mode():
        full = model(**inputs, pixel_values=images).logits
        last = model(**inputs, pixel_values=images, logits_to_keep=1).logits
    assert full.shape[1] == inputs["input_ids"].shape[1] > NUM_IMAGE_TOKENS
    torch.testing.assert_close(last, full[:, -1:])


HARD = ["3", "5", '"a"', "(b)"]  # tokenizers do not merge these with a preceding blank
BLANK = {
    "name": "mine",
    "chat_template": (
        "{% for message in messages %}{% if message.role == 'user' %}{{ 'Q: ' + message.content }}{% else %}"
        "{{ ' A: ' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' A:' }}{% endif %}"
    ),
    "stop_tokens": [],
    "control_tokens": [],
}


@pytest.mark.parametrize(
    ("template", "make_processor"),
    [
        pytest.param("gemma", tiny_processor, marks=pytest.mark.slow),
        pytest.param("plain", tiny_processor, marks=pytest.mark.slow),
        (BLANK, tiny_processor),
        pytest.param("chatml", tiny_qwen_processor, marks=pytest.mark.slow),
        ("plain", tiny_qwen_processor),
    ],
)
def test_learned_answers_are_generated(tmp_path, template, make_processor):
    processor = make_processor()
    config = mgm_config("qwen2")
    config.text_config.vocab_size, config.image_token_id = len(processor.tokenizer), processor.image_token_id
    torch.manual_seed(0)
    model = MGMForConditionalGeneration(config)
    images = [save_image(tmp_path / f"{n}.png", (80 * n, 30, 90), (40, 40)) for n in range(len(HARD))]
    encoder = MGMEncoder(processor, template, 64)
    items = [
        encoder.encode_row(build_conversation("1", str(image), "Q?", text))
        for image, text in zip(images, HARD, strict=True)
    ]
    batch = encoder.batch(items, max(len(item["input_ids"]) for item in items))
    batch["pixel_values"] = processor.normalize_pixels(batch["pixel_values"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "mgm")
    processor.save_pretrained(tmp_path / "mgm")
    generator = MGMGenerator(tmp_path / "mgm", None, "cpu")
    question = "" if template == "plain" else "Q?"  # the format has no question
    assert list(generator.answer(images, [question] * 4, template, max_new_tokens=8, batch_size=4)) == HARD


@pytest.mark.parametrize("processes", [1, 3])
def test_arrays_are_filled_in_order(processes):
    def fill(number: int, array: np.ndarray) -> None:
        time.sleep(random.random() / 1000)
        array[:] = number

    arrays = fill_in_order(fill, range(50), processes, np.zeros((2, 3), np.uint8))
    assert [array.tolist() for array in arrays] == [[[number] * 3] * 2 for number in range(50)]
