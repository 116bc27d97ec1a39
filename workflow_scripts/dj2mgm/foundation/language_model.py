"""Training of the tiny language model, which has Gemma's architecture and learns to read scenes.

Its training texts are a board of scene words, followed by a caption or a conversation. Without scenes in its context, a
language model does not learn to use images from a few thousand pairs, while a pretrained LLM knows descriptions of all
kinds. The board has one word for each patch of the CLIP tower. In MGM the projected visual tokens take their place.
"""

import math
import random
import time
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaTokenizer, get_cosine_schedule_with_warmup

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
    draw_question,
    draw_row_scene,
)
from dj2mgm.divergence import check_end, check_finite
from dj2mgm.foundation.tokenizers import train_gemma_tokenizer
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.settings.generation_prompts import CAPTION_QUESTION
from dj2mgm.settings.models import LanguageModelRecipe

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
