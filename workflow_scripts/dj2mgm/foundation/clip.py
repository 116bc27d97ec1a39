"""Training of the tiny CLIP and, with the same text tower, of the tiny high-resolution ConvNeXt."""

import time
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    ConvNextConfig,
    ConvNextModel,
    get_cosine_schedule_with_warmup,
)

from dj2mgm.cli.messages import Progress
from dj2mgm.compute import mixed_precision
from dj2mgm.data.shapes import IMAGE_SIZE, describe_scene, draw_image, draw_row_scene
from dj2mgm.divergence import check_end, check_finite
from dj2mgm.foundation.tokenizers import train_clip_tokenizer
from dj2mgm.settings.models import ClipRecipe
from dj2mgm.storage.files import replace_folder

TEXT_LENGTH = 48  # tokens of the text tower's context
MEAN = STD = (0.5, 0.5, 0.5)  # pixels go from [0, 1] to [-1, 1]


def build_clip(spec: ClipRecipe, tokenizer: CLIPTokenizer) -> CLIPModel:
    """Return an untrained CLIP whose two towers have the same width and depth."""
    tower = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": 4 * spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
    }
    text = tower | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": TEXT_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = tower | {"image_size": spec.image_size, "patch_size": spec.patch_size}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=spec.hidden_size))


def build_convnext(spec: ClipRecipe) -> ConvNextModel:
    channels = list(spec.convnext_channels)
    return ConvNextModel(
        ConvNextConfig(hidden_sizes=channels, depths=[1] * len(channels), patch_size=4, image_size=IMAGE_SIZE)
    )


def build_processor(tokenizer: CLIPTokenizer, size: int) -> CLIPProcessor:
    # the PIL backend, because no environment of this workflow contains torchvision
    images = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, image_mean=MEAN, image_std=STD
    )
    return CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def clean_pairs(spec: ClipRecipe) -> tuple[torch.Tensor, list[str]]:
    """Return images (pairs, 3, IMAGE_SIZE, IMAGE_SIZE) uint8 and their captions from the foundation split."""
    scenes = [draw_row_scene(spec.seed, "foundation", index) for index in range(spec.pairs)]
    images = numpy.stack([numpy.asarray(draw_image(scene)) for scene in scenes])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), [describe_scene(scene) for scene in scenes]


def compute_contrastive_loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the symmetric InfoNCE over features (B, D) (Radford et al. 2021, arXiv:2103.00020, figure 3)."""
    logits = scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def train_clip(spec: ClipRecipe, clip_folder: Path, convnext_folder: Path) -> dict:
    """Train both image towers with one text tower, save two `from_pretrained` folders, and return a record."""
    start = time.monotonic()
    images, captions = clean_pairs(spec)
    tokenizer = train_clip_tokenizer(captions, TEXT_LENGTH)
    clip, convnext = build_clip(spec, tokenizer), build_convnext(spec)
    to_text_space = torch.nn.Linear(spec.convnext_channels[-1], spec.hidden_size, bias=False)
    tokens = tokenizer(captions, padding=True, truncation=True, return_tensors="pt")

    parameters = [*clip.parameters(), *convnext.parameters(), *to_text_space.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=0.05)
    steps = spec.epochs * (spec.pairs // spec.batch_size)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    generator = torch.Generator().manual_seed(spec.seed)
    progress = Progress("steps", steps)
    losses: list[tuple[int, float]] = []
    for _ in range(spec.epochs):
        order = torch.randperm(spec.pairs, generator=generator)
        for batch in order[: len(order) // spec.batch_size * spec.batch_size].split(spec.batch_size):
            pixels = images[batch].float() / 127.5 - 1
            low = F.interpolate(pixels, size=spec.image_size, mode="area")
            with mixed_precision(pixels.device):
                output = clip(
                    pixel_values=low, input_ids=tokens.input_ids[batch], attention_mask=tokens.attention_mask[batch]
                )
                high = to_text_space(convnext(pixels.to(memory_format=torch.channels_last)).pooler_output)
            text, scale = output.text_embeds.float(), clip.logit_scale.exp().clamp(max=100)
            loss_low = compute_contrastive_loss(output.image_embeds.float(), text, scale)
            loss_high = compute_contrastive_loss(high.float(), text.detach(), scale.detach())
            (loss_low + loss_high).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append((len(losses) + 1, (loss_low + loss_high).item()))
            check_finite("clip", *losses[-1], spec.learning_rate)
            progress.add(detail=f"loss {loss_low.item():.3f}, high-resolution loss {loss_high.item():.3f}")
    check_end("clip", losses, spec.batch_size, spec.learning_rate)

    with replace_folder(convnext_folder) as folder:
        convnext.eval().save_pretrained(folder)
    with replace_folder(clip_folder) as folder:
        clip.eval().save_pretrained(folder)
        build_processor(tokenizer, spec.image_size).save_pretrained(folder)
    return {
        "steps": steps,
        "loss_last": loss_low.item(),
        "loss_last_high_resolution": loss_high.item(),
        "seconds": time.monotonic() - start,
    }
