"""Greedy search for answers to many questions about images, for models of all families.

Prompts about an image begin with the same tokens, mainly the image's; their keys and values are computed once. The work
for the next token of all answers is recorded as a CUDA graph and replayed, because its kernels are so small that a GPU
would otherwise wait for their launches. Answers equal those of transformers' `generate` without sampling.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import ceil
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel, StaticLayer
from transformers.cache_utils import DynamicSlidingWindowLayer

from dj2mgm.models.questions import cut_at_stop

TOKENS_AT_ONCE = 2**14  # in one forward pass; enough to keep a GPU busy, while activations stay small
UNIT = 16  # on a GPU prompts are padded to a multiple of it, so that kernels are planned for few lengths
STATIC_UNIT = 64  # keys and values have room for a multiple of it, so that batches can use the same graph
VALUE_DEPENDENT_ROPES = ("dynamic", "longrope")

# Inputs of the model for tokens (B, T), their mask (B, T) and the index of each row's image
MakeInputs = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], dict]


class Prompts(NamedTuple):
    """Tokens of prompts, each about one image or none."""

    tokens: list[list[int]]
    prefixes: list[int]  # number of tokens at the beginning of each prompt that depend on its image only
    images: list[int]  # index of each prompt's image
    make_inputs: MakeInputs


class ReadPart(NamedTuple):
    """Rows that the model has read together."""

    rows: slice
    cache: Cache
    logits: torch.Tensor  # (b, V), after the last token
    positions: torch.Tensor  # (…, b, 1) of the last token


class GreedySearch:
    """Greedy search for the answers to batches of prompts, of which those of one shape use the same CUDA graph.

    Args:
        stops: tokens that end an answer.
        pad: token for padding.
        max_new_tokens: length at which an answer is cut.
    """

    def __init__(self, model: PreTrainedModel, stops: Sequence[int], pad: int, max_new_tokens: int):
        self.model, self.stops, self.pad, self.max_new_tokens = model, list(stops), pad, max_new_tokens
        self._step: Step | None = None

    @torch.inference_mode()
    def __call__(self, prompts: Prompts) -> list[list[int]]:
        """Return the tokens of each answer before the first stop token."""
        ids, mask, prefix = self._arrange(prompts)
        try:
            if supports_static_cache(self.model, ids.shape[1] + self.max_new_tokens):
                answers = self._search(prompts, ids, mask, prefix)
            else:
                answers = self._generate(prompts)
        except torch.OutOfMemoryError:
            self._step = None
            raise
        return [cut_at_stop(answer, set(self.stops)) for answer in answers.tolist()]

    def _generate(self, prompts: Prompts) -> torch.Tensor:
        """Return what `_search` returns, by transformers' own search."""
        width = max(map(len, prompts.tokens))
        return self.model.generate(
            **prompts.make_inputs(*self._pad_left(prompts.tokens, width), prompts.images),
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self.stops,
            pad_token_id=self.pad,
            do_sample=False,
            num_beams=1,
        )[:, width:]

    def _search(self, prompts: Prompts, ids: torch.Tensor, mask: torch.Tensor, prefix: int) -> torch.Tensor:
        """Return the tokens (B, at most `max_new_tokens`) of all answers.

        Args:
            ids: (B, T) of the prompts, as `mask`.
            prefix: length of the prefixes that prompts share, or 0.
        """
        step = self._prepare_step(*ids.shape)
        firsts = [prompts.images.index(image) for image in sorted(set(prompts.images))]
        shared = None
        if prefix:
            parts = read_in_parts(self.model, prompts.make_inputs, ids[firsts, :prefix], mask[firsts, :prefix])
            shared = concatenate_caches([part.cache for part in parts])
        tokens, positions = [], []
        for part in read_in_parts(self.model, prompts.make_inputs, ids, mask, prompts.images, shared):
            step.write(part)
            tokens.append(part.logits.argmax(dim=-1, keepdim=True))
            positions.append(part.positions)
        del shared, part
        step.begin(mask, torch.cat(positions, dim=-2))

        answers, ends = [torch.cat(tokens)], torch.tensor(self.stops, device=self.model.device)
        done = torch.isin(answers[-1], ends)
        while len(answers) < self.max_new_tokens and not done.all():
            answers.append(step(answers[-1]))
            done |= torch.isin(answers[-1], ends)
        return torch.cat(answers, dim=1)

    def _arrange(self, prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return tokens and mask (B, P + S), and P, the length of the prefixes that prompts share, or 0.

        Prefixes are padded on the left. Shared prefixes have padding between them and the question, too, so that all
        prefixes and all prompts end at the same position.
        """
        unit = UNIT if self.model.device.type == "cuda" else 1
        beginnings = [tuple(ids[:count]) for ids, count in zip(prompts.tokens, prompts.prefixes, strict=True)]
        questions = [ids[count:] for ids, count in zip(prompts.tokens, prompts.prefixes, strict=True)]
        images, lengths = len(set(prompts.images)), set(prompts.prefixes)
        are_equal = images == len(set(zip(prompts.images, beginnings, strict=True)))
        saves_time = images < len(questions) or len(lengths) == 1  # attention is faster without padding
        if not (are_equal and saves_time and all(beginnings) and all(questions)):
            return *self._pad_left(prompts.tokens, _round_up(max(map(len, prompts.tokens)), unit)), 0
        prefix = max(prompts.prefixes)
        parts = (
            self._pad_left(beginnings, prefix),
            self._pad_left(questions, _round_up(max(map(len, questions)), unit)),
        )
        ids, mask = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return ids, mask, prefix

    def _pad_left(self, rows: Sequence[Sequence[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and mask (B, width) of rows."""
        ids = torch.tensor([[self.pad] * (width - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids, mask

    def _prepare_step(self, rows: int, width: int) -> "Step":
        """Return a step for prompts (rows, width) and their answers, the previous one if it has the shape."""
        length = _round_up(width + self.max_new_tokens, STATIC_UNIT)
        if not self._step or self._step.rows != rows or self._step.length < length:
            self._step = None  # frees its memory first
            self._step = Step(self.model, rows, length)
        return self._step


class Step:
    """Forward pass for one token of each row, after the tokens in a cache: (B, 1) → the next tokens (B, 1).

    A CUDA graph needs tensors of fixed address and size, so cache and mask have room for `length` tokens. The graph is
    recorded in the second pass, because the first one initializes kernels, which cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int):
        self.model, self.rows, self.length = model, rows, length
        layers = len(_make_cache(model).layers)
        self.cache = Cache(layers=[StaticLayer(length) for _ in range(layers)])
        self.visible, self.hidden, dtype = True, False, torch.bool
        if _get_text_config(model)._attn_implementation == "eager":  # adds the mask to its logits
            self.visible, self.hidden, dtype = 0.0, torch.finfo(model.dtype).min, model.dtype
        self.mask = torch.zeros(rows, 1, 1, length, dtype=dtype, device=model.device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(1, dtype=torch.long, device=model.device)  # index of the next token in the cache
        self.positions: torch.Tensor | None = None  # (…, B, 1) of the next tokens for the position embedding
        self.is_ready, self.graph = False, None

    def write(self, part: ReadPart) -> None:
        """Copy keys and values of some rows to the beginning of the cache."""
        for layer, read in zip(self.cache.layers, part.cache.layers, strict=True):
            if not layer.is_initialized:
                shape = (self.rows, -1, -1, -1)
                layer.lazy_initialization(read.keys[:1].expand(shape), read.values[:1].expand(shape))
            layer.keys[part.rows, :, : read.keys.shape[2]] = read.keys
            layer.values[part.rows, :, : read.keys.shape[2]] = read.values

    def begin(self, mask: torch.Tensor, positions: torch.Tensor) -> None:
        """Continue after the prompts: their mask (B, T), and the positions (…, B, 1) of their last tokens."""
        length = mask.shape[1]
        self.mask.fill_(self.hidden)
        self.mask[..., :length].masked_fill_(mask[:, None, None].to(self.mask.device, torch.bool), self.visible)
        self.position.fill_(length)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
        self.positions = positions.clone() if self.positions is None else self.positions.copy_(positions)
        self.positions += 1

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        if self.is_ready and self.tokens.is_cuda:
            with torch.cuda.device(self.tokens.device):
                if self.graph is None:
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):
                        self._run()
                self.graph.replay()
        else:
            self._run()
            self.is_ready = True
        return self.tokens.clone()

    def _run(self) -> None:
        self.mask.index_fill_(3, self.position, self.visible)
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.tokens.copy_(output.logits[:, -1:].argmax(dim=-1))
        self.position.add_(1)
        self.positions.add_(1)


def supports_static_cache(model: PreTrainedModel, length: int) -> bool:
    """Return whether a step for answers of `length` tokens with their prompts can be recorded.

    Attention must not have a shorter window, and no control flow may depend on values.
    """
    config = _get_text_config(model)
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {ropes.get("rope_type"), *(rope.get("rope_type") for rope in ropes.values() if isinstance(rope, dict))}
    sees_all = all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length)
        for layer in _make_cache(model).layers
    )
    is_static = model.get_decoder()._can_compile_fullgraph and kinds.isdisjoint(VALUE_DEPENDENT_ROPES)
    return sees_all and is_static and config._attn_implementation in ("sdpa", "eager")


@torch.inference_mode()
def read_in_parts(
    model: PreTrainedModel,
    make_inputs: MakeInputs,
    ids: torch.Tensor,
    mask: torch.Tensor,
    images: Sequence[int] | None = None,
    shared: Cache | None = None,
) -> Iterator[ReadPart]:
    """Let the model read tokens (B, T), at most `TOKENS_AT_ONCE` in a forward pass.

    Args:
        images: index of each row's image; None if they are in order.
        shared: keys and values of each image's prefix, after which tokens are read; each part gets a copy.
    """
    images = list(range(len(ids)) if images is None else images)
    prefix = shared.get_seq_length() if shared else 0
    size = max(1, TOKENS_AT_ONCE // (ids.shape[1] - prefix))
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        inputs = make_inputs(ids[rows], mask[rows], images[rows])
        inputs["position_ids"] = _compute_positions(model, inputs)
        inputs |= {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        cache = select_rows(shared, images[rows]) if shared else _make_cache(model)
        prepared = model.prepare_inputs_for_generation(
            **inputs,
            past_key_values=cache,
            next_sequence_length=ids.shape[1] - prefix,
            is_first_iteration=not prefix,
            use_cache=True,
        )
        output = model(**prepared)
        yield ReadPart(rows, cache, output.logits[:, -1], prepared["position_ids"][..., -1:])


def _compute_positions(model: PreTrainedModel, inputs: dict) -> torch.Tensor:
    """Return the positions (…, b, T) of tokens; some models' code reads single values, for which a GPU would wait."""
    on_cpu = {
        name: values.cpu()
        for name, values in inputs.items()
        if isinstance(values, torch.Tensor) and not values.is_floating_point()
    }
    return model._prepare_position_ids_for_generation(on_cpu["input_ids"], on_cpu).to(model.device)


def select_rows(cache: Cache, rows: Sequence[int]) -> Cache:
    """Return a cache of some rows; `cache` itself does not change."""
    selected = copy(cache)
    selected.layers = [copy(layer) for layer in cache.layers]
    if list(rows) != list(range(len(cache.layers[0].keys))):
        selected.batch_select_indices(torch.tensor(rows, device=cache.layers[0].keys.device))
    return selected


def concatenate_caches(caches: list[Cache]) -> Cache:
    """Concatenate the rows of caches, which are emptied layer by layer to save memory."""
    first, *others = caches
    for layers in zip(*(cache.layers for cache in caches), strict=True) if others else ():
        for name in ("keys", "values"):
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)
    return first


def _get_text_config(model: PreTrainedModel):
    return model.config.get_text_config(decoder=True)


def _make_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=_get_text_config(model))


def _round_up(length: int, unit: int) -> int:
    return ceil(length / unit) * unit
