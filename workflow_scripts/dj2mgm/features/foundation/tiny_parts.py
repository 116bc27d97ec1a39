"""Training of the embedded default's parts: tiny CLIP and ConvNeXt, a tiny language model, and their tokenizers.

The ConvNeXt is trained with CLIP's text tower. The tokenizers contain every byte, so that they tokenize any language,
but less compactly than scenes. The language model has Gemma's architecture and learns to read scenes:

Its training texts are a board of scene words, followed by a caption or a conversation. Without scenes in its context, a
language model does not learn to use images from a few thousand pairs, while a pretrained LLM knows descriptions of all
kinds. The board has one word for each patch of the CLIP tower. In MGM the projected visual tokens take their place.
"""

import json
import math
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    ConvNextConfig,
    ConvNextModel,
    GemmaConfig,
    GemmaTokenizer,
    get_cosine_schedule_with_warmup,
)

from dj2mgm.cli.messages import Progress
from dj2mgm.compute import mixed_precision
from dj2mgm.data.chat_template import ChatTemplate, Segments
from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.data.shapes import (
    COLORS,
    IMAGE_SIZE,
    QUESTION_TYPES,
    SHAPES,
    Scene,
    SceneObject,
    describe_scene,
    draw_image,
    draw_question,
    draw_row_scene,
)
from dj2mgm.divergence import check_end, check_finite
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.settings.data import CAPTION_QUESTION
from dj2mgm.settings.models import ClipRecipe, LanguageModelRecipe
from dj2mgm.storage.files import replace_folder

GEMMA_IMAGE_TOKEN = "<unused0>"  # Gemma's first unused token, at the image's positions
START_OF_TURN, END_OF_TURN = "<start_of_turn>", "<end_of_turn>"


def train_clip_tokenizer(corpus: Iterable[str], max_length: int) -> CLIPTokenizer:
    """Return CLIP's tokenizer class with merges learned from `corpus` (lower-case words ending in </w>)."""
    empty = CLIPTokenizer().backend_tokenizer
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(letter + "</w>" for letter in alphabet)]
    vocab, merges = _build_vocabulary(tokens, tokenizer)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)


def train_gemma_tokenizer(corpus: Iterable[str], scene_words: Iterable[str]) -> GemmaTokenizer:
    """Return Gemma's tokenizer class with merges learned within the words of `corpus`; `scene_words` stay whole."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", behavior="merged_with_next"),
            pre_tokenizers.Split(Regex(r"[^\w▁]"), behavior="isolated"),
        ]
    )
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=2000, show_progress=False))
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", GEMMA_IMAGE_TOKEN, START_OF_TURN, END_OF_TURN]
    letters = ["\n", "▁", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab, merges = _build_vocabulary(tokens, tokenizer)
    gemma = GemmaTokenizer(vocab=vocab, merges=merges)
    gemma.add_special_tokens({"additional_special_tokens": [GEMMA_IMAGE_TOKEN, START_OF_TURN, END_OF_TURN]})
    gemma.add_tokens(list(scene_words))
    return gemma


def _build_vocabulary(tokens: list[str], trained: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges: the fixed `tokens`, then the learned tokens in the order of their training."""
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    vocab: dict[str, int] = {}
    for token in [*tokens, *learned]:
        vocab.setdefault(token, len(vocab))
    return vocab, [tuple(pair) for pair in model["merges"]]


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


EMPTY_WORD = "[empty]"


def list_scene_words() -> list[str]:
    return [EMPTY_WORD, *(format_scene_word(color, shape) for color in COLORS for shape in SHAPES)]


def draw_board(scene: Scene, side: int, rng: random.Random, confusion: float = 0.15) -> list[str]:
    """Return side × side scene words in reading order, with random errors.

    With probability `confusion` a patch of an object becomes empty or gets another color or shape, so that the model
    learns to weigh uncertain evidence, as it must with projected visual tokens.
    """
    patch = IMAGE_SIZE / side
    board = []
    for row in range(side):
        for column in range(side):
            center = ((column + 0.5) * patch, (row + 0.5) * patch)
            inside = [item for item in scene.objects if _reaches(item, center, patch / 2)]
            board.append(_report_object(inside[0].color, inside[0].shape, rng, confusion) if inside else EMPTY_WORD)
    return board


def _reaches(item: SceneObject, center: tuple[float, float], half: float) -> bool:
    """Return whether 80 % of the object's radius reaches into the square patch around `center`."""
    gaps = (max(0.0, abs(a - b) - half) for a, b in zip(item.center, center, strict=True))
    return sum(gap**2 for gap in gaps) < (0.8 * item.radius) ** 2


def load_chat_templates(tokenizer: GemmaTokenizer) -> dict[str, ChatTemplate]:
    """Return the chat templates of the tiny model's two stages by name."""
    return {name: ChatTemplate.load(name, tokenizer) for name in ("plain", "gemma")}


def draw_training_example(scene: Scene, side: int, templates: dict[str, ChatTemplate], rng: random.Random) -> Segments:
    """Return an example as (text, is_answer) segments: a plain caption or a conversation, with the board as image.

    Args:
        side: words along one side of the board.
        templates: templates from `load_chat_templates`.
    """
    if rng.random() < 0.35:
        turns, template = _build_turns(IMAGE_TOKEN, describe_scene(scene)), "plain"
    else:
        template, turns = "gemma", []
        for kind in rng.sample(QUESTION_TYPES, 3):
            turns += _build_turns(*draw_question(scene, kind, rng))
        description = _build_turns(CAPTION_QUESTION, describe_scene(scene))
        turns = description + turns if rng.random() < 0.5 else turns + description
        turns[0]["value"] = f"{IMAGE_TOKEN}\n{turns[0]['value']}"
    board = "".join(draw_board(scene, side, rng))
    return [
        (text.replace(IMAGE_TOKEN, board), is_answer) for text, is_answer in templates[template].render_segments(turns)
    ]


def _build_turns(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def format_scene_word(color: str, shape: str) -> str:
    return f"[{color} {shape}]"


def _report_object(color: str, shape: str, rng: random.Random, confusion: float) -> str:
    if rng.random() >= confusion:
        return format_scene_word(color, shape)
    mistake = rng.randrange(3)
    if mistake == 0:
        return EMPTY_WORD
    if mistake == 1:
        return format_scene_word(rng.choice(list(COLORS)), shape)
    return format_scene_word(color, rng.choice(SHAPES))


def build_tokenizer(seed: int, scenes: int = 2000) -> GemmaTokenizer:
    rng = random.Random(f"{seed}/tokenizer")
    corpus = ["user\n", "model\n", CAPTION_QUESTION]
    for index in range(scenes):
        scene = draw_row_scene(seed, "foundation", index)
        corpus.append(describe_scene(scene))
        for kind in QUESTION_TYPES:
            corpus += draw_question(scene, kind, rng)
    return train_gemma_tokenizer(corpus, list_scene_words())


def build_tiny_model(spec: LanguageModelRecipe, tokenizer: GemmaTokenizer) -> torch.nn.Module:
    """Return an untrained Gemma whose vocabulary is padded to a multiple of 64."""
    head_dim = spec.hidden_size // spec.num_heads
    config = GemmaConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=spec.hidden_size,
        intermediate_size=4 * spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=1,  # as in Gemma-2B
        head_dim=head_dim,
        max_position_embeddings=1024,
        initializer_range=spec.hidden_size**-0.5,  # with the usual 0.02, for widths of 2500, attention learns nothing
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def encode_batch(spec: LanguageModelRecipe, tokenizer: GemmaTokenizer, step: int) -> dict[str, torch.Tensor]:
    """Return a right-padded batch of `batch_size` examples: input_ids, attention_mask, labels (B, T) int64."""
    rows, templates = [], load_chat_templates(tokenizer)
    for index in range(step * spec.batch_size, (step + 1) * spec.batch_size):
        scene, rng = draw_row_scene(spec.seed, "foundation", index), random.Random(f"{spec.seed}/text/{index}")
        ids, labels = [tokenizer.bos_token_id], [IGNORE_INDEX]
        for text, is_answer in draw_training_example(scene, spec.patches_per_side, templates, rng):
            tokens = tokenizer(text, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if is_answer else [IGNORE_INDEX] * len(tokens)
        rows.append((torch.tensor(ids), torch.tensor(labels)))
    ids, labels = zip(*rows, strict=True)
    input_ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
    return {"input_ids": input_ids, "attention_mask": (input_ids != tokenizer.pad_token_id).long(), "labels": labels}


def train_language_model(spec: LanguageModelRecipe, folder: Path) -> dict:
    """Train on new examples in every step, save model and tokenizer in `folder`, and return a record."""
    start = time.monotonic()
    tokenizer = build_tokenizer(spec.seed)
    model = build_tiny_model(spec, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, spec.steps // 20, spec.steps)
    progress = Progress("steps", spec.steps)
    losses: list[tuple[int, float]] = []
    model.train()
    for step in range(spec.steps):
        with mixed_precision(model.device):
            loss = model(**encode_batch(spec, tokenizer, step), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append((step + 1, loss.item()))
        check_finite("language_model", *losses[-1], spec.learning_rate)
        progress.add(detail=f"loss {losses[-1][1]:.3f}")
    check_end("language_model", losses, spec.batch_size, spec.learning_rate)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"steps": spec.steps, "loss_last": losses[-1][1], "seconds": time.monotonic() - start}
