"""Byte-pair tokenizers for the tiny CLIP and the tiny Gemma, in the classes of the real ones.

Both contain every byte, so that they tokenize any language, but less compactly than scenes.
"""

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import CLIPTokenizer, GemmaTokenizer

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
