"""Random CLIP and SigLIP for tests without trained weights or downloads."""

from pathlib import Path

import sentencepiece
import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipProcessor,
    SiglipTokenizer,
)

TOKEN_LIMIT = 24
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = "a red green blue yellow circle square star at the top bottom left right two cats and dog photo of"


def save_tiny_clip(folder: Path, seed: int = 0) -> Path:
    """Save a random CLIP whose tokens are single characters."""
    characters = [chr(code) for code in range(33, 127)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    tokenizer = CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    text = {"vocab_size": len(tokens), "max_position_embeddings": TOKEN_LIMIT, "eos_token_id": 1, "bos_token_id": 0}
    vision = {"image_size": 32, "patch_size": 8}
    torch.manual_seed(seed)
    CLIPModel(
        CLIPConfig(text_config=TOWER | text, vision_config=TOWER | vision, projection_dim=16, initializer_factor=5.0)
    ).save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=pixels, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def save_tiny_siglip(folder: Path) -> Path:
    """Save a random SigLIP with the tokenizer of its class."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 20),
        model_prefix=str(folder / "spiece"),
        vocab_size=64,
        hard_vocab_limit=False,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        minloglevel=2,
    )
    tokenizer = SiglipTokenizer(str(folder / "spiece.model"))
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": TOKEN_LIMIT, "projection_size": 32}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(8)
    model = SiglipModel(
        SiglipConfig(text_config=TOWER | text, vision_config=TOWER | {"image_size": 32, "patch_size": 8})
    )
    for parameter in model.parameters():  # with the initial values, all texts have the same features
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    pixels = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    SiglipProcessor(image_processor=pixels, tokenizer=tokenizer).save_pretrained(folder)
    return folder
