"""The processor of MGM: padded images, image tokens, and left-padded prompts."""

import pytest
import torch
from PIL import Image

from dj2mgm.models.vision_language import IGNORE_INDEX
from tiny_models import IMAGE_SIDE, NUM_IMAGE_TOKENS, tiny_processor


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@pytest.mark.parametrize("size", [(64, 64), (128, 32), (30, 90), (1, 1), (200, 3), (1000, 64)])
def test_images_of_any_shape_are_padded_to_squares(processor, size):
    """Red and green must remain at the ends of the longer side."""
    image = Image.new("RGB", size, (255, 0, 0))
    across = size[0] >= size[1]
    half = (size[0] // 2, 0) if across else (0, size[1] // 2)
    image.paste((0, 255, 0), (*half, *size))
    values = processor.build_pixel_values([image])
    assert values.shape == (1, 3, IMAGE_SIDE, IMAGE_SIDE) and values.dtype == torch.float32
    if min(size) < 3:
        return
    line = values[0, :, IMAGE_SIDE // 2] if across else values[0, :, :, IMAGE_SIDE // 2]
    assert line[0, 1] > line[1, 1] and line[1, -2] > line[0, -2]


@pytest.mark.parametrize("side", [IMAGE_SIDE, 40, 301])
def test_pixels_equal_those_of_the_image_processor(processor, side):
    image = Image.effect_noise((side, side), 64).convert("RGB")
    stock = processor.image_processor(image, do_rescale=False, do_normalize=False, return_tensors="pt").pixel_values
    assert torch.equal(processor.resize_images([image]), stock)


def test_there_is_one_image_token_per_visual_token(processor):
    ids = processor.encode([("red <image> blue", False)])["input_ids"]
    tokens = processor.tokenizer
    assert ids == (
        [tokens.bos_token_id]
        + tokens("red ", add_special_tokens=False).input_ids
        + [processor.image_token_id] * NUM_IMAGE_TOKENS
        + tokens(" blue", add_special_tokens=False).input_ids
    )


def test_tokens_do_not_span_prompt_and_answer(processor):
    whole = processor.encode([("How many?", False), ("two", True)])
    prompt = processor.encode([("How many?", False)])["input_ids"]
    answer = processor.tokenizer("two", add_special_tokens=False).input_ids
    assert whole["input_ids"] == prompt + answer
    assert whole["labels"] == [IGNORE_INDEX] * len(prompt) + answer


def test_prompts_are_padded_and_masked_on_the_left(processor):
    texts = ["<image>\nHow many objects are there?", "<image>"]
    batch = processor.encode_prompts(texts)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    for row, text in enumerate(texts):
        ids = processor.encode([(text, False)])["input_ids"]
        padding = batch["input_ids"].shape[1] - len(ids)
        assert batch["input_ids"][row].tolist() == [processor.tokenizer.pad_token_id] * padding + ids
        assert batch["attention_mask"][row].tolist() == [0] * padding + [1] * len(ids)
