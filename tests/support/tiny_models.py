"""Tiny random models and a real Gemma tokenizer that the unit tests share; nothing is downloaded."""

from functools import cache
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    GemmaConfig,
    GemmaTokenizer,
    MistralConfig,
    Qwen2Config,
    Qwen2Tokenizer,
)

from dj2mgm.foundation.tokenizers import IMAGE_TOKEN, train_gemma_tokenizer
from dj2mgm.mgm import MGMConfig, MGMForConditionalGeneration, MGMProcessor
from dj2mgm.vision_language import IGNORED
from published_mgm import Sizes

torch.set_num_threads(1)  # with tensors this small, threads only wait for each other

IMAGE_SIDE = 64  # px that the model is given: 16 × 16 ConvNeXt features
PATCHES = 4  # CLIP patches a side: 16 image tokens, each with 4 × 4 sub-patches
NUM_IMAGE_TOKENS = PATCHES**2
CORPUS = ["What color is the circle? a red circle at the top left", "How many objects are there? two", "user model"]


@cache
def tiny_tokenizer() -> GemmaTokenizer:
    return train_gemma_tokenizer(CORPUS, [])


@cache
def tiny_qwen_tokenizer() -> Qwen2Tokenizer:
    """Of Qwen2.5's class and control tokens: no beginning-of-sequence token, <|im_end|> ends a sequence."""
    trained = Qwen2Tokenizer().train_new_from_iterator([CORPUS], 320)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    trained.add_special_tokens({"additional_special_tokens": control})
    trained.eos_token, trained.pad_token = "<|im_end|>", "<|endoftext|>"
    return trained


def text_config(family: str) -> GemmaConfig | MistralConfig | Qwen2Config:
    tokenizer = tiny_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    match family:
        case "gemma":
            return GemmaConfig(**sizes, head_dim=8)
        case "mistral":  # its attention slides over less than an image
            return MistralConfig(**sizes, head_dim=8, sliding_window=12)
    return Qwen2Config(**sizes, tie_word_embeddings=False)


def vision_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=8 * PATCHES,
        patch_size=8,
    )


def vision_aux_config() -> ConvNextConfig:
    return ConvNextConfig(hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 1])


def mgm_config(family: str = "gemma") -> MGMConfig:
    tokenizer = tiny_tokenizer()
    return MGMConfig(
        text_config=text_config(family),
        vision_config=vision_config(),
        vision_aux_config=vision_aux_config(),
        image_size_aux=IMAGE_SIDE,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


TINY_SIZES = Sizes(  # of the models above, on Gemma
    vocab=len(tiny_tokenizer()),
    hidden=32,
    intermediate=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    clip_hidden=24,
    clip_intermediate=32,
    clip_layers=3,
    clip_heads=2,
    clip_side=8 * PATCHES,
    clip_patch=8,
    widths=(8, 12, 16, 24),
    depths=(1, 1, 1, 1),
)


def save_parts(root: Path, families: tuple[str, ...] = ("gemma",)) -> None:
    """Folders as they come from a hub: language models under their family's name, `clip`, `convnext`."""
    torch.manual_seed(3)
    for family in families:
        language = AutoModelForCausalLM.from_config(text_config(family))
        randomize(language)
        language.save_pretrained(root / family)
        tiny_tokenizer().save_pretrained(root / family)
    for name, model in (("clip", CLIPVisionModel(vision_config())), ("convnext", ConvNextModel(vision_aux_config()))):
        randomize(model)
        model.save_pretrained(root / name)
    side = vision_config().image_size
    crop = {"height": side, "width": side}
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=crop).save_pretrained(root / "clip")


def tiny_parts(root: Path, family: str = "gemma") -> dict:
    """What a model file in config/models says about the folders of `save_parts`."""
    return {
        "language_model": str(root / family),
        "vision_tower": str(root / "clip"),
        "vision_tower_aux": str(root / "convnext"),
        "image_size_aux": IMAGE_SIDE,
        "image_token": IMAGE_TOKEN,
    }


def randomize(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Weights so large that every part of the model moves the result; biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def tiny_mgm(family: str = "gemma", dtype: torch.dtype = torch.float32) -> MGMForConditionalGeneration:
    torch.manual_seed(0)
    model = MGMForConditionalGeneration(mgm_config(family)).eval()
    randomize(model)
    return model.to(dtype)


def tiny_processor() -> MGMProcessor:
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIDE}, crop_size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    )
    return MGMProcessor(pixels, tiny_tokenizer(), IMAGE_TOKEN, NUM_IMAGE_TOKENS)


def tiny_qwen_processor() -> MGMProcessor:
    return MGMProcessor(tiny_processor().image_processor, tiny_qwen_tokenizer(), "<|image_pad|>", NUM_IMAGE_TOKENS)


def pixels(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random images as the model is given them: (count, 3, S', S')."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator, dtype=dtype)


def training_batch(model: MGMForConditionalGeneration, rows: int = 3, seed: int = 2) -> dict[str, torch.Tensor]:
    """Image, question, and an answer of a different length in each row; right padding."""
    generator = torch.Generator().manual_seed(seed)
    config, length = model.config, NUM_IMAGE_TOKENS + 12
    input_ids = torch.randint(10, config.text_config.vocab_size, (rows, length), generator=generator)
    input_ids[:, 1 : 1 + NUM_IMAGE_TOKENS] = config.image_token_id
    labels, mask = torch.full_like(input_ids, IGNORED), torch.ones_like(input_ids)
    for row in range(rows):
        end = length - row
        mask[row, end:] = 0
        input_ids[row, end:] = config.pad_token_id
        labels[row, length - 7 : end] = input_ids[row, length - 7 : end]
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "labels": labels,
        "pixel_values": pixels(rows, dtype=model.dtype),
    }


def save_image(path: Path, color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path
