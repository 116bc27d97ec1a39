"""An MGM of random weights and conversations about drawn images, for benchmarks that must not download anything."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, ConvNextConfig, GemmaConfig

from files import write_jsonl
from foundation.tiny_tokenizers import IMAGE_TOKEN, train_gemma_tokenizer
from mgm import MGMConfig, MGMForConditionalGeneration, MGMProcessor

WORDS = [f"{first}{second}" for first in ("ba", "de", "ki", "lo", "mu") for second in ("ra", "se", "ti", "vo", "nu")]
IMAGES = 256

# keyword arguments of (GemmaConfig, CLIPVisionConfig, ConvNextConfig), and the side of the images in pixels
SHAPES = {
    # Gemma-2B; CLIP ViT-L/14 at 336; ConvNeXt-L at 768
    "mgm-2b": (
        {"vocab_size": 256_000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
        | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": 336, "patch_size": 14, "projection_dim": 768},
        {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3]},
        768,
    ),
    # to try a benchmark without a GPU
    "tiny": (
        {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        | {"image_size": 32, "patch_size": 8},
        {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1]},
        64,
    ),
}


def save_random_mgm(shape: str, folder: Path) -> MGMForConditionalGeneration:
    """An assembled model in bf16, made on the GPU if there is one: 3 billion random numbers take a CPU minutes."""
    text, vision, vision_aux, side = SHAPES[shape]
    torch.manual_seed(0)
    tokenizer = train_gemma_tokenizer([" ".join(WORDS)], [])
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = MGMConfig(
        text_config=GemmaConfig(**text, **tokens),
        vision_config=CLIPVisionConfig(**vision),
        vision_aux_config=ConvNextConfig(**vision_aux),
        image_size_aux=side,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        dtype="bfloat16",
        **tokens,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = MGMForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    MGMProcessor(pixels, tokenizer, IMAGE_TOKEN, config.num_image_tokens).save_pretrained(folder)
    return model


def write_conversations(data: Path, rows: int, asked: int, answered: int) -> None:
    """A jsonl of `rows` conversations, with so many words asked and answered, about JPEG images of 640×480 pixels."""
    folder, random = data.parent, np.random.default_rng(0)
    for index in range(IMAGES):
        path = folder / "images" / f"{index}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            coarse.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)

    write_jsonl(
        data,
        (
            {
                "id": str(row),
                "image": str(folder / "images" / f"{row % IMAGES}.jpg"),
                "conversations": [
                    {"from": "human", "value": "<image>\n" + " ".join(random.choice(WORDS, asked))},
                    {"from": "gpt", "value": " ".join(random.choice(WORDS, answered))},
                ],
            }
            for row in range(rows)
        ),
    )
