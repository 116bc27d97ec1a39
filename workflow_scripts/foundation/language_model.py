"""Trains the tiny language model: Gemma's architecture, taught to read scenes (see scene_text.py)."""

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaTokenizer, get_cosine_schedule_with_warmup

from compute import mixed_precision
from foundation.scene_text import DESCRIBE, scene_words, training_text
from foundation.tiny_tokenizers import train_gemma_tokenizer
from shapes.dataset import scene_of
from shapes.scenes import QUESTION_TYPES, ask, describe

IGNORED = -100  # label of positions without loss


@dataclass(frozen=True)
class LanguageModelSpec:
    seed: int
    patches_per_side: int  # of the CLIP tower: the board is this many words wide
    hidden_size: int
    num_layers: int
    num_heads: int
    steps: int
    batch_size: int
    learning_rate: float


def build_tokenizer(seed: int, scenes: int = 2000) -> GemmaTokenizer:
    rng = random.Random(f"{seed}/tokenizer")
    corpus = ["user\n", "model\n", DESCRIBE]
    for index in range(scenes):
        scene = scene_of(seed, "foundation", index)
        corpus.append(describe(scene))
        for kind in QUESTION_TYPES:
            corpus += ask(scene, kind, rng)
    return train_gemma_tokenizer(corpus, scene_words())


def build_model(spec: LanguageModelSpec, tokenizer: GemmaTokenizer) -> torch.nn.Module:
    head_dim = spec.hidden_size // spec.num_heads
    config = GemmaConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=spec.hidden_size,
        intermediate_size=4 * spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=1,  # as Gemma-2B
        head_dim=head_dim,
        max_position_embeddings=1024,
        initializer_range=spec.hidden_size**-0.5,  # the usual 0.02 suits widths of 2500; here attention would not start
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def encode_batch(spec: LanguageModelSpec, tokenizer: GemmaTokenizer, step: int) -> dict[str, torch.Tensor]:
    """One batch of `batch_size` examples, right-padded: input_ids, attention_mask, labels (B, T) int64."""
    rows = []
    for index in range(step * spec.batch_size, (step + 1) * spec.batch_size):
        scene, rng = scene_of(spec.seed, "foundation", index), random.Random(f"{spec.seed}/text/{index}")
        ids, labels = [tokenizer.bos_token_id], [IGNORED]
        for text, is_answer in training_text(scene, spec.patches_per_side, tokenizer.eos_token, rng):
            tokens = tokenizer(text, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if is_answer else [IGNORED] * len(tokens)
        rows.append((torch.tensor(ids), torch.tensor(labels)))
    ids, labels = zip(*rows, strict=True)
    input_ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return {"input_ids": input_ids, "attention_mask": (input_ids != tokenizer.pad_token_id).long(), "labels": labels}


def train_language_model(spec: LanguageModelSpec, folder: Path) -> dict:
    """Train on fresh examples every step and save model and tokenizer in `folder`; return a record."""
    start = time.monotonic()
    tokenizer = build_tokenizer(spec.seed)
    model = build_model(spec, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, spec.steps // 20, spec.steps)
    model.train()
    for step in range(spec.steps):
        with mixed_precision(model.device):
            loss = model(**encode_batch(spec, tokenizer, step), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == spec.steps - 1:
            print(f"language model  step {step + 1}/{spec.steps}  loss {loss.item():.3f}", flush=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"steps": spec.steps, "loss_last": loss.item(), "seconds": time.monotonic() - start}
