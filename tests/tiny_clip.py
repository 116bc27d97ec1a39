"""A random CLIP, for tests that need one but not what it sees; nothing is downloaded."""

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

TOKEN_LIMIT = 24


def save_tiny_clip(folder: Path) -> Path:
    """A random CLIP, as `save_pretrained` leaves it, whose tokens are single characters."""
    characters = [chr(code) for code in range(33, 127)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    tokenizer = CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokens), "max_position_embeddings": TOKEN_LIMIT, "eos_token_id": 1, "bos_token_id": 0}
    vision = {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(
        CLIPConfig(text_config=tower | text, vision_config=tower | vision, projection_dim=16, initializer_factor=5.0)
    ).save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=pixels, tokenizer=tokenizer).save_pretrained(folder)
    return folder
