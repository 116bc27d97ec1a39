"""Greedy answers, captions and likelihoods of a trained MGM, for many images at a time.

Likelihoods are those of the captions that a beam search finds, and of given answers. The beam search is that of
transformers' `generate` (`num_beams`, `length_penalty` 1, `early_stopping` False); tests compare the two. `generate`
returns likelihoods only with the scores of every step, 262 MB a step for 64 images, 4 beams and Gemma's vocabulary of
256 000, and it encodes every image once for each beam.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from io import BytesIO
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn.functional import log_softmax
from transformers import Cache, GenerationConfig

from dj2mgm.compute import select_device
from dj2mgm.data.chat_template import TEMPLATE_REMEDY, ChatTemplate
from dj2mgm.data.formats import build_conversation, build_text_conversation
from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.models.greedy_search import (
    TOKENS_AT_ONCE,
    GreedySearch,
    MakeInputs,
    Prompts,
    find_end,
    make_cache,
    read_tokens,
    split_batch,
)
from dj2mgm.models.mgm import MGMConfig, MGMForConditionalGeneration, MGMProcessor
from dj2mgm.models.questions import (
    Candidates,
    GivenAnswer,
    Image,
    QuestionBatch,
    check_control_tokens,
    cut_at_stop,
    make_image_key,
    split_into_parts,
    with_new_images,
)
from dj2mgm.models.trained_weights import load_stage_weights
from dj2mgm.models.vision_language import IGNORE_INDEX, Generator
from dj2mgm.storage.files import read_json, readable
from dj2mgm.storage.streaming import ITEMS_AHEAD, map_in_order

# Batch size for "auto": on a CPU, and the maximum on a GPU, which larger batches do not use better
CPU_BATCH_SIZE, MAX_GPU_BATCH_SIZE = 64, 256
QUESTION_TOKENS, FLOAT32 = 128, 4
DECODING, DECODED_AT_ONCE = 8, 8  # processes that decode images for a GPU, and images in each of their results
VISUAL_BYTES = 2**31  # for cached visual tokens: 900 images at MGM-2B's shape
T = TypeVar("T")
# token ids before the stop token, and the log-likelihood in nats including the stop token
Hypothesis = tuple[list[int], float]
LOGITS_AT_ONCE = 2**27  # 512 MiB in float32


def load_trained(base: Path, stage: Path | None, dtype: torch.dtype | str) -> MGMForConditionalGeneration:
    """Load a base model with the weights that a training stage wrote: projector, and LoRA adapter or language model.

    Args:
        base: folder of an assembled, converted or merged model.
        stage: output folder of `pretrain` or `finetune`; None for the base without a stage.
        dtype: type of the weights; "auto" for the base's own.
    """
    if not (base / "config.json").is_file():
        raise InputError(f"{base} contains no config.json, so it is not a model folder; name another one")
    remedy = "make or download its folder again"
    kind = read_json(base / "config.json", remedy=remedy).get("model_type")
    if kind != MGMConfig.model_type:
        raise InputError(f"{base} contains a model of type {kind}; name an assembled, converted or merged MGM")
    with readable(base, SafetensorError, OSError, remedy=remedy):
        model = MGMForConditionalGeneration.from_pretrained(
            base, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    return (model if stage is None else load_stage_weights(model, stage)).eval()


class MGMGenerator(Generator):
    """Generator for MGM, from `load_trained`.

    It runs in bf16 on a GPU and otherwise in float32; without a `device`, on the GPU if there is one.
    """

    def __init__(self, base: Path, stage: Path | None, device: str | torch.device | None = None):
        self.device = torch.device(device or select_device())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = load_trained(base, stage, dtype).to(self.device)
        self.model.generation_config = GenerationConfig()  # answers are greedy; the folder's settings are ignored
        self.processor = MGMProcessor.from_pretrained(base)
        self._cache: dict[str, torch.Tensor] = {}  # visual tokens, by path

    def close(self) -> None:
        del self.model
        self._cache.clear()

    @torch.inference_mode()
    def answer_batches(
        self, batches: list[QuestionBatch], template: str | dict, max_new_tokens: int
    ) -> Iterator[list[str]]:
        tokenizer = self.processor.tokenizer
        chat = ChatTemplate.load(template, tokenizer)
        stops = chat.stop_ids(tokenizer)
        search = GreedySearch(self.model, stops, stops[0], max_new_tokens)
        for batch, new in with_new_images(batches, self._cache, self._encode_in_parts):
            has_images = batch.images != [None]
            visual = self._get_visual_tokens(list(map(make_image_key, batch.images)), new) if has_images else None
            texts = [(chat.render_prompt(question, has_images), False) for question in batch.questions]
            tokens = [self.processor.encode([text])["input_ids"] for text in texts]
            prefixes = [find_end(ids, self.processor.image_token_id) if has_images else 1 for ids in tokens]
            answers = search(Prompts(tokens, prefixes, batch.about, partial(self._make_inputs, visual)))
            yield [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def _make_inputs(
        self,
        visual_tokens: torch.Tensor | None,
        ids: torch.Tensor,
        mask: torch.Tensor,
        images: Sequence[int],
        with_features: bool,
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for rows of tokens about `images`, indices of `visual_tokens`."""
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        if visual_tokens is None or not with_features:
            return inputs
        return inputs | {"visual_tokens": visual_tokens[list(images)]}

    def list_control_tokens(self, template: str | dict) -> Collection[str]:
        return ChatTemplate.load(template, self.processor.tokenizer).control_tokens

    def choose_batch_size(self, max_new_tokens: int) -> int:
        """Return the number of questions whose keys, values and logits take half of a GPU's free memory.

        The other half is for the activations.
        """
        if self.device.type != "cuda":
            return CPU_BATCH_SIZE
        config, dtype = self.model.config.get_text_config(), self.model.dtype
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
        tokens = self.processor.num_image_tokens + QUESTION_TOKENS + max_new_tokens
        row = tokens * token + config.vocab_size * (dtype.itemsize + FLOAT32)
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        cached_bytes = sum(tokens.nbytes for tokens in self._cache.values())
        free = torch.cuda.mem_get_info(self.device)[0] + reserved - (VISUAL_BYTES - cached_bytes)
        rows = max(1, free // 2 // row)
        return min(MAX_GPU_BATCH_SIZE, 1 << (rows.bit_length() - 1))

    @torch.inference_mode()
    def generate_candidates(
        self,
        images: Sequence[str | Path],
        question: str,
        template: str | dict,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        """Search captions of `batch_size` images at a time; equal images are not merged."""
        chat = ChatTemplate.load(template, self.processor.tokenizer)
        stops = chat.stop_ids(self.processor.tokenizer)
        # repeated images stay in the batches, because a batch's size changes the last bits of the results
        for batch in self._iterate_batches(images, batch_size):
            input_ids = self.processor.encode_prompts([chat.render_prompt(question)] * len(batch))["input_ids"].to(
                self.device
            )
            visual_tokens = self._encode(batch)
            hypotheses = beam_search(self.model, input_ids, visual_tokens, num_beams, stops, max_new_tokens)
            yield from map(self._decode_captions, hypotheses)

    @torch.inference_mode()
    def compute_answer_log_likelihoods(
        self, images: Sequence[Image], answers: Sequence[GivenAnswer], template: str | dict
    ) -> list[list[float]]:
        """Return the log-likelihoods; each image, and the text that all prompts begin with, is computed once."""
        if not answers:
            return []
        check_control_tokens((answer.text for answer in answers), self.list_control_tokens(template))
        chat = ChatTemplate.load(template, self.processor.tokenizer)
        question_answer_pairs = {(answer.question, answer.text) for answer in answers}
        for question, _ in question_answer_pairs:
            chat.check_question(question)
        has_images = None not in images
        build = partial(build_conversation, "", "") if has_images else build_text_conversation
        conversations = {pair: build(*pair)["conversations"] for pair in question_answer_pairs}
        encoded = {pair: self.processor.encode(chat.render_segments(turns)) for pair, turns in conversations.items()}
        items = [encoded[answer.question, answer.text] for answer in answers]
        begin = self._measure_shared_prefix(list(encoded.values()), chat)
        tokens = None
        if has_images:
            files = {make_image_key(image): image for image in images}
            missing = [key for key in files if key not in self._cache]
            new = dict(zip(missing, self._encode_in_parts([files[key] for key in missing]), strict=True))
            tokens = self._get_visual_tokens(list(map(make_image_key, images)), new)
        return compute_answer_log_likelihoods(
            self.model,
            items[0]["input_ids"][:begin],
            partial(self._make_inputs, tokens),
            [answer.about for answer in answers],
            [item["input_ids"][begin:] for item in items],
            [item["labels"][begin:] for item in items],
        )

    def _measure_shared_prefix(self, items: list[dict], chat: ChatTemplate) -> int:
        """Return the number of tokens that all conversations begin with, up to the first answer."""
        ends = (
            next(position for position, label in enumerate(item["labels"]) if label != IGNORE_INDEX) for item in items
        )
        prefix = os.path.commonprefix([item["input_ids"] for item in items])[: min(ends)]
        if any(self.processor.image_token_id in item["input_ids"][len(prefix) :] for item in items):
            raise InputError(
                f"template {chat.name}: the text before the image depends on the question; {TEMPLATE_REMEDY}"
            )
        return len(prefix)

    def _decode_captions(self, hypotheses: list[tuple[list[int], float]]) -> Candidates:
        texts = self.processor.tokenizer.batch_decode([tokens for tokens, _ in hypotheses], skip_special_tokens=True)
        captions: dict[str, float] = {}
        for text, (_, log_likelihood) in zip(texts, hypotheses, strict=True):
            captions.setdefault(text.strip(), log_likelihood)
        return list(captions.items())

    def _iterate_batches(self, images: Sequence[str | Path | BytesIO], size: int) -> Iterator[torch.Tensor]:
        """Yield images as batches (B, 3, S', S') uint8 of `size`.

        For a GPU they are in page-locked memory, from which it copies while this process continues.
        """
        pixels, on_gpu = self._decode_images(images), self.device.type == "cuda"
        for count in map(len, split_into_parts(images, size)):
            batch = torch.empty((count, *self.processor.image_shape), dtype=torch.uint8, pin_memory=on_gpu)
            for row in batch.numpy():  # numpy copies in one thread; PyTorch's would wait for cores that decode
                row[:] = next(pixels)
            yield batch

    def _decode_images(self, images: Sequence[str | Path | BytesIO]) -> Iterator[np.ndarray]:
        """Yield each image as (3, S', S') uint8, valid until the next; consecutive equal images are decoded once.

        For a GPU, other processes decode images ahead; threads would slow down the launch of the GPU's kernels.
        """
        cores = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
        processes = min(DECODING, max(2, cores - 1)) if self.device.type == "cuda" else 1
        runs = [(next(run), 1 + sum(1 for _ in run)) for _, run in groupby(images, key=make_image_key)]
        parts = split_into_parts([image for image, _ in runs], DECODED_AT_ONCE)
        like = np.empty((DECODED_AT_ONCE, *self.processor.image_shape), np.uint8)
        pixels = chain.from_iterable(fill_in_order(self._decode, parts, processes, like))
        for (_, times), image in zip(runs, pixels):  # noqa: B905 (the last part of images may be smaller)
            yield from repeat(image, times)

    def _decode(self, images: Sequence[str | Path | BytesIO], pixels: np.ndarray) -> None:
        """Write images into an array (at least B, 3, S', S') uint8."""
        if self.device.type == "cuda":
            torch.set_num_threads(1)  # a forked process does not have OpenMP's threads
        pixels[: len(images)] = self.processor.resize_images([load_image(image) for image in images]).numpy()

    def _encode_in_parts(self, images: Sequence[Image]) -> Iterator[torch.Tensor]:
        """Yield the visual tokens (N, H) of each image; a GPU encodes a part while the next one is decoded."""
        size = max(1, TOKENS_AT_ONCE // self.processor.num_image_tokens)
        for batch in self._iterate_batches(images, size):
            yield from map(torch.clone, self._encode(batch))  # views would keep the whole batch in memory

    def _encode(self, batch: torch.Tensor) -> torch.Tensor:
        """Encode images: (B, 3, S', S') uint8 → (B, N, H)."""
        return self.model.model.get_image_features(
            self.processor.normalize_pixels(batch.to(self.device, non_blocking=True))
        )

    def _get_visual_tokens(self, keys: list, new: dict[object, torch.Tensor]) -> torch.Tensor:
        """Return the visual tokens (B, N, H) of each key; visual tokens of paths are cached, up to `VISUAL_BYTES`.

        `new` has the visual tokens of the images that are not cached.
        """
        tokens_by_key = self._cache | new
        tokens = torch.stack([tokens_by_key[key] for key in keys])
        paths = [key for key in tokens_by_key if isinstance(key, str)]  # an open file is read once
        self._cache.clear()
        self._cache |= {path: tokens_by_key[path] for path in paths[-max(1, VISUAL_BYTES // tokens[0].nbytes) :]}
        return tokens


def fill_in_order(
    fill: Callable[[T, np.ndarray], None], items: Iterable[T], processes: int, like: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield an array for each item, which `fill(item, array)` wrote in one of `processes` forked processes.

    The arrays are shared memory, so no results are pickled. It is anonymous, because containers limit /dev/shm. An
    array is valid until the next one is requested.

    Args:
        like: an array of the shape and type of all results.
    """
    count = ITEMS_AHEAD * processes  # `map_in_order` has at most this many items that are processed or waiting
    shared = np.frombuffer(mmap.mmap(-1, count * like.nbytes), like.dtype).reshape(count, *like.shape)

    def run(numbered: tuple[int, T]) -> None:
        number, item = numbered
        fill(item, shared[number % count])

    for number, _ in enumerate(map_in_order(run, enumerate(items), processes)):
        yield shared[number % count]


@torch.inference_mode()
def beam_search(
    model: MGMForConditionalGeneration,
    input_ids: torch.Tensor,
    visual_tokens: torch.Tensor,
    num_beams: int,
    stops: list[int],
    max_new_tokens: int,
) -> list[list[Hypothesis]]:
    """Return up to `num_beams` continuations of each prompt, the highest log-likelihood per token first.

    Args:
        input_ids: (B, T) prompts of equal length, without padding.
        visual_tokens: (B, N, H) of the prompts' images.
        stops: tokens that end a continuation.
        max_new_tokens: length at which a continuation is cut.
    """
    batch, device = len(input_ids), input_ids.device
    ends = torch.tensor(stops, device=device)
    output = model(input_ids=input_ids, visual_tokens=visual_tokens, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    cache.batch_repeat_interleave(num_beams)  # prompt and image are computed once for all beams

    running = torch.empty(batch, 1, 0, dtype=torch.long, device=device)  # (B, beams, steps); starts with one empty beam
    scores = torch.zeros(batch, 1, device=device)
    sequences = torch.empty(batch, num_beams, 0, dtype=torch.long, device=device)
    means = torch.full((batch, num_beams), -torch.inf, device=device)  # log-likelihood per token; −∞ marks a free slot
    totals = torch.full((batch, num_beams), -torch.inf, device=device)
    done = torch.zeros(batch, 1, dtype=torch.bool, device=device)

    for step in range(1, max_new_tokens + 1):
        log_probs = log_softmax(output.logits[:, -1].float(), dim=-1)
        vocabulary = log_probs.shape[-1]
        log_probs = log_probs.view(batch, -1, vocabulary) + scores.unsqueeze(-1)
        # enough candidates to continue `num_beams` beams even if all stop tokens are among them
        best, indices = log_probs.flatten(1).topk(min((1 + len(stops)) * num_beams, log_probs[0].numel()))
        tokens = (indices % vocabulary).unsqueeze(-1)
        extended = torch.cat([_gather_rows(running, indices // vocabulary), tokens], dim=-1)  # (B, candidates, steps)
        stopped = torch.isin(tokens.squeeze(-1), ends) | (step == max_new_tokens)

        finished = stopped[:, :num_beams] & ~done
        means = torch.cat([means, (best[:, :num_beams] / step).where(finished, -torch.inf)], dim=1)
        totals = torch.cat([totals, best[:, :num_beams]], dim=1)
        sequences = torch.cat(
            [torch.nn.functional.pad(sequences, (0, 1), value=stops[0]), extended[:, :num_beams]], dim=1
        )
        means, order = means.topk(num_beams)
        totals, sequences = totals.gather(1, order), _gather_rows(sequences, order)

        scores, order = best.masked_fill(stopped, -torch.inf).topk(num_beams)
        running = _gather_rows(extended, order)
        # as in `generate`: the best running beam's mean at this length counts as the bound of all longer beams
        done |= means[:, -1:] >= scores[:, :1] / step
        if done.all() or step == max_new_tokens:
            break
        parents = (indices // vocabulary).gather(1, order)
        if step > 1:  # in the first step all beams are the prompt
            cache.reorder_cache((parents + num_beams * torch.arange(batch, device=device).unsqueeze(1)).flatten())
        output = model(
            input_ids=running[:, :, -1].reshape(-1, 1), past_key_values=cache, use_cache=True, logits_to_keep=1
        )

    stop_set = set(stops)
    return [
        [(cut_at_stop(tokens, stop_set), total) for tokens, mean, total in zip(*row, strict=True) if mean > -torch.inf]
        for row in zip(sequences.tolist(), means.tolist(), totals.tolist(), strict=True)
    ]


def _gather_rows(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Select rows: values (B, K, steps), order (B, k) → (B, k, steps)."""
    return values.gather(1, order.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


@torch.inference_mode()
def compute_answer_log_likelihoods(
    model: MGMForConditionalGeneration,
    prefix: Sequence[int],
    make_inputs: MakeInputs,
    images: Sequence[int],
    answers: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Return the log-likelihoods of each answer's labelled tokens in nats.

    Args:
        prefix: p tokens with which all conversations begin, including the image tokens.
        images: index of each answer's image; 0 without images.
        answers: the tokens after the prefix.
        labels: the same tokens, or `IGNORE_INDEX` for tokens that do not count.
    """
    device = model.device
    count = max(images) + 1
    prefixes, caches, logits = torch.tensor(prefix).expand(count, -1), [], []
    for rows in split_batch(0, count, len(prefix)):
        caches.append(make_cache(model))
        inputs = prefixes[rows], torch.ones_like(prefixes[rows]), range(count)[rows]
        logits.append(read_tokens(model, make_inputs, *inputs, caches[-1])[0])
    first, cache = torch.cat(logits), _concatenate_caches(caches)
    width = max(map(len, answers))
    ids = torch.tensor([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in answers], device=device)
    labels = torch.tensor([[*targets, *[IGNORE_INDEX] * (width - len(targets))] for targets in labels], device=device)
    size = max(1, min(TOKENS_AT_ONCE // (len(prefix) + width), LOGITS_AT_ONCE // (width * first.shape[1])))
    log_likelihoods: list[list[float]] = []
    for start in range(0, len(ids), size):
        rows, tokens, targets = (values[start : start + size] for values in (images, ids, labels))
        logits = first[list(rows)].unsqueeze(1)  # (b, 1, V), after the prefix
        if width > 1:  # padding on the right needs no mask under causal attention
            output = model(input_ids=tokens[:, :-1], past_key_values=_select_rows(cache, rows), use_cache=True)
            logits = torch.cat([logits, output.logits], dim=1)
        values = log_softmax(logits.float(), dim=-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
        counted = targets != IGNORE_INDEX
        log_likelihoods += [row[mask].tolist() for row, mask in zip(values.cpu(), counted.cpu(), strict=True)]
    return log_likelihoods


def _select_rows(cache: Cache, rows: Sequence[int]) -> Cache:
    """Return a cache of some rows; `cache` itself does not change."""
    selected = copy(cache)
    selected.layers = [copy(layer) for layer in cache.layers]
    if list(rows) != list(range(len(cache.layers[0].keys))):
        selected.batch_select_indices(torch.tensor(rows, device=cache.layers[0].keys.device))
    return selected


def _concatenate_caches(caches: list[Cache]) -> Cache:
    """Concatenate the rows of caches, which are emptied layer by layer to save memory."""
    first, *others = caches
    for layers in zip(*(cache.layers for cache in caches), strict=True) if others else ():
        for name in ("keys", "values"):
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)
    return first
