"""Captioners with random weights and random images for tests of captions, without downloads."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    OPTConfig,
    PreTrainedTokenizerFast,
)

from dj2mgm.data.formats import build_dj_text
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.storage.files import write_jsonl
from dj2mgm.training.outputs import gather_weights, save_projector
from tiny_clip import save_tiny_clip
from tiny_models import tiny_mgm, tiny_processor

BLIP2_IMAGE_TOKEN = 50265  # Data-Juicer sets this id in every model that it loads
QUERY_TOKENS = 4


def save_tiny_blip2(folder: Path) -> Path:
    """Save a random BLIP-2 whose vocabulary (w0, w1, …) has the real size."""
    special_tokens = ["<pad>", "<s>", "</s>", "<unk>"]
    words = special_tokens + [f"w{number}" for number in range(BLIP2_IMAGE_TOKEN - len(special_tokens))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    image_processor = BlipImageProcessorPil(size={"height": 32, "width": 32})
    processor = Blip2Processor(image_processor, tokenizer, num_query_tokens=QUERY_TOKENS)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = OPTConfig(
        vocab_size=BLIP2_IMAGE_TOKEN + 1,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**sizes, image_size=32, patch_size=16).to_dict(),
        qformer_config=Blip2QFormerConfig(**sizes, encoder_hidden_size=16, vocab_size=8).to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=QUERY_TOKENS,
        image_token_index=BLIP2_IMAGE_TOKEN,
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    # every tenth word ends a caption, which Data-Juicer's operator would otherwise continue for 128 words
    model.generation_config.eos_token_id = [2, *range(10, BLIP2_IMAGE_TOKEN, 10)]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def recaption(rows: dict[str, list], **arguments) -> tuple[list[dict], dict]:
    """Run low_similarity_recaption_mapper on columns in both phases; return its rows and its report."""
    [operator] = load_ops([{"low_similarity_recaption_mapper": arguments}])
    empty: dict[str, list] = {column: [{} for _ in rows["text"]] for column in (Fields.stats, Fields.meta)}
    samples = operator.measure({key: list(values) for key, values in rows.items()} | empty)
    operator.set_limits(samples[Fields.stats])
    columns = operator.process(samples)
    operator.close()
    recaptioned = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return recaptioned, operator.finish_report(operator.report)


def write_pairs(folder: Path, captions: list[str]) -> Path:
    """Write a Data-Juicer jsonl with an image of noise for each caption (rows r0, r1, …)."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = []
    for number, caption in enumerate(captions):
        Image.fromarray(rng.integers(0, 256, (32, 40, 3), dtype=np.uint8)).save(folder / f"images/{number}.png")
        rows.append({"id": f"r{number}", "text": build_dj_text(caption), "images": [f"images/{number}.png"]})
    write_jsonl(folder / "pairs.jsonl", rows)
    return folder / "pairs.jsonl"


def save_tiny_mgm(folder: Path) -> tuple[Path, Path]:
    """Save a random MGM like stage 1 does, in the folders `base` and `pretrain`."""
    model = tiny_mgm()
    model.save_pretrained(folder / "base")
    tiny_processor().save_pretrained(folder / "base")
    parts = (".projector.", ".patch_info_mining.")
    projector = {name: tensor for name, tensor in model.named_parameters() if any(part in name for part in parts)}
    save_projector(model, gather_weights(projector), folder / "pretrain")
    return folder / "base", folder / "pretrain"


def save_project(folder: Path, captions: list[str]) -> Path:
    """Save pairs in `data/`, a CLIP in `clip/`, and a captioner in `base/` and `pretrain/`, all random."""
    write_pairs(folder / "data", captions)
    save_tiny_clip(folder / "clip")
    save_tiny_mgm(folder)
    return folder
