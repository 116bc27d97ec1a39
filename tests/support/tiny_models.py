"""Tiny random MGM models and tokenizers of the real classes, shared by the unit tests, without downloads."""

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

from dj2mgm.features.foundation.tiny_parts import GEMMA_IMAGE_TOKEN, train_gemma_tokenizer
from dj2mgm.models.mgm import MGMConfig, MGMForConditionalGeneration, MGMProcessor
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.settings.models import ClipRecipe
from published_mgm import Sizes

torch.set_num_threads(1)  # several threads are slower for such small tensors

IMAGE_SIDE = 64  # px of the model's input: 16 × 16 ConvNeXt features
PATCHES = 4  # CLIP patches per side: 16 image tokens, each with 4 × 4 sub-patches
NUM_IMAGE_TOKENS = PATCHES**2
CORPUS = ["What color is the circle? a red circle at the top left", "How many objects are there? two", "user model"]


@cache
def tiny_tokenizer() -> GemmaTokenizer:
    return train_gemma_tokenizer(CORPUS, [])


@cache
def tiny_qwen_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer like Qwen2.5's, without a beginning-of-sequence token and with <|im_end|> as the end token."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator([CORPUS], 320)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


TINY_SIZES = Sizes(
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


def special_tokens() -> dict[str, int]:
    return {f"{name}_token_id": getattr(tiny_tokenizer(), f"{name}_token_id") for name in ("pad", "bos", "eos")}


def text_config(family: str = "gemma", sizes: Sizes = TINY_SIZES) -> GemmaConfig | MistralConfig | Qwen2Config:
    values = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 256,
        **special_tokens(),
    }
    match family:
        case "gemma":
            return GemmaConfig(**values, head_dim=sizes.head_dim)
        case "mistral":  # its attention window is shorter than an image
            return MistralConfig(**values, head_dim=sizes.head_dim, sliding_window=12)
    return Qwen2Config(**values, tie_word_embeddings=False)


def vision_config(sizes: Sizes = TINY_SIZES) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=sizes.clip_hidden,
        intermediate_size=sizes.clip_intermediate,
        num_hidden_layers=sizes.clip_layers,
        num_attention_heads=sizes.clip_heads,
        image_size=sizes.clip_side,
        patch_size=sizes.clip_patch,
    )


def vision_aux_config(sizes: Sizes = TINY_SIZES) -> ConvNextConfig:
    return ConvNextConfig(hidden_sizes=list(sizes.widths), depths=list(sizes.depths))


def mgm_config(family: str = "gemma", sizes: Sizes = TINY_SIZES, image_side: int = IMAGE_SIDE) -> MGMConfig:
    return MGMConfig(
        text_config=text_config(family, sizes),
        vision_config=vision_config(sizes),
        vision_aux_config=vision_aux_config(sizes),
        image_size_aux=image_side,
        image_token_id=tiny_tokenizer().convert_tokens_to_ids(GEMMA_IMAGE_TOKEN),
        **special_tokens(),
    )


def clip_spec(**settings) -> ClipRecipe:
    """Return the settings for training a tiny CLIP and ConvNeXt for a few steps."""
    return ClipRecipe.from_sections(
        seed=0,
        pairs=16,
        epochs=4,
        batch_size=4,
        image_size=TINY_SIZES.clip_side,
        patch_size=TINY_SIZES.clip_patch,
        hidden_size=TINY_SIZES.clip_hidden,
        num_layers=1,
        num_heads=TINY_SIZES.clip_heads,
        convnext_channels=TINY_SIZES.widths,
        **settings,
    )


def save_parts(root: Path, families: tuple[str, ...] = ("gemma",)) -> None:
    """Save folders like a hub's: language models under their family's name, `clip` and `convnext`."""
    torch.manual_seed(3)
    for family in families:
        language_model = AutoModelForCausalLM.from_config(text_config(family))
        randomize(language_model)
        language_model.save_pretrained(root / family)
        tiny_tokenizer().save_pretrained(root / family)
    for name, model in (("clip", CLIPVisionModel(vision_config())), ("convnext", ConvNextModel(vision_aux_config()))):
        randomize(model)
        model.save_pretrained(root / name)
    side = vision_config().image_size
    crop = {"height": side, "width": side}
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=crop).save_pretrained(root / "clip")


def tiny_parts(root: Path, family: str = "gemma") -> dict:
    """Return the keys of a file in config/models for the folders of `save_parts`."""
    return {
        "language_model": str(root / family),
        "vision_tower": str(root / "clip"),
        "vision_tower_aux": str(root / "convnext"),
        "image_size_aux": IMAGE_SIDE,
        "image_token": GEMMA_IMAGE_TOKEN,
    }


def randomize(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Add noise to all parameters, large enough that every part of the model changes the results."""
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
    return MGMProcessor(pixels, tiny_tokenizer(), GEMMA_IMAGE_TOKEN, NUM_IMAGE_TOKENS)


def tiny_qwen_processor() -> MGMProcessor:
    return MGMProcessor(tiny_processor().image_processor, tiny_qwen_tokenizer(), "<|image_pad|>", NUM_IMAGE_TOKENS)


def pixels(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random inputs of the model (count, 3, S', S')."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator, dtype=dtype)


def training_batch(model: MGMForConditionalGeneration, rows: int = 3, seed: int = 2) -> dict[str, torch.Tensor]:
    """Return a right-padded batch of image, question and answer, with answers of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    config, length = model.config, NUM_IMAGE_TOKENS + 12
    input_ids = torch.randint(10, config.text_config.vocab_size, (rows, length), generator=generator)
    input_ids[:, 1 : 1 + NUM_IMAGE_TOKENS] = config.image_token_id
    labels, mask = torch.full_like(input_ids, IGNORE_INDEX), torch.ones_like(input_ids)
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
