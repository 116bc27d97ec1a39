"""Greedy search for answers to many questions about images, for models of all families.

Prompts about an image begin with the same tokens, mainly the image's; their keys and values are computed once. The work
for the next token of all answers is recorded as a CUDA graph and replayed, because its kernels are so small that a GPU
would otherwise wait for their launches. Up to rounding, answers equal those of transformers' `generate` without
sampling.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import ceil
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel, StaticLayer
from transformers.cache_utils import DynamicSlidingWindowLayer

from dj2mgm.cli.messages import note
from dj2mgm.models.questions import cut_at_stop

TOKENS_AT_ONCE = 2**14  # in one forward pass; enough to keep a GPU busy, while activations stay small
UNIT = 16  # on a GPU prompts are padded to a multiple of it, so that kernels are planned for few lengths
STATIC_UNIT = 64  # keys and values have room for a multiple of it, so that batches can use the same graph
VALUE_DEPENDENT_ROPES = ("dynamic", "longrope")

# Inputs of the model for tokens (B, T), their mask (B, T) and the index of each row's image, with or without the
# images' features
MakeInputs = Callable[[torch.Tensor, torch.Tensor, Sequence[int], bool], dict]


class Prompts(NamedTuple):
    """Tokens of prompts, each about one image or none."""

    tokens: list[list[int]]
    prefixes: list[int]  # number of tokens at the beginning of each prompt that depend on its image only
    images: list[int]  # index of each prompt's image, from 0 on
    make_inputs: MakeInputs


class GreedySearch:
    """Greedy search for the answers to batches of prompts, of which those of one shape use the same CUDA graph.

    Args:
        stops: tokens that end an answer.
        pad: token for padding.
        max_new_tokens: length at which an answer is cut.
    """

    def __init__(self, model: PreTrainedModel, stops: Sequence[int], pad: int, max_new_tokens: int):
        self.model, self.stops, self.pad, self.max_new_tokens = model, list(stops), pad, max_new_tokens
        self._step: DecodingStep | None = None

    @torch.inference_mode()
    def __call__(self, prompts: Prompts) -> list[list[int]]:
        """Return the tokens of each answer before the first stop token."""
        order = sorted(range(len(prompts.tokens)), key=prompts.images.__getitem__)
        ordered = ([values[row] for row in order] for values in prompts[:3])
        try:
            answers = self._search(Prompts(*ordered, prompts.make_inputs)).tolist()
        except torch.OutOfMemoryError:
            self.free()
            raise
        by_row = dict(zip(order, answers, strict=True))
        return [cut_at_stop(by_row[row], self.stops) for row in range(len(answers))]

    def free(self) -> bool:
        """Free the memory that is kept for the next batch; return whether there was some."""
        step, self._step = self._step, None
        return step is not None

    def _generate(self, prompts: Prompts) -> torch.Tensor:
        """Return what `_search` returns, by transformers' own search."""
        width = max(map(len, prompts.tokens))
        return self.model.generate(
            **prompts.make_inputs(*pad_left(prompts.tokens, width, self.pad), prompts.images, True),
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self.stops,
            pad_token_id=self.pad,
            do_sample=False,
            num_beams=1,
        )[:, width:]

    def _search(self, prompts: Prompts) -> torch.Tensor:
        """Return the tokens (B, at most `max_new_tokens`) of all answers."""
        ids, mask, prefix = self._arrange(prompts)
        if not supports_static_cache(self.model, ids.shape[1] + self.max_new_tokens):
            return self._generate(prompts)
        step = self._prepare_step(*ids.shape)
        parts = self._read_by_image(prompts, ids, mask, prefix) if prefix else self._read_by_row(prompts, ids, mask)
        logits, positions = zip(*parts, strict=True)
        step.begin(mask, torch.cat(positions, dim=-2))

        answers, ends = [torch.cat(logits).argmax(-1, keepdim=True)], torch.tensor(self.stops, device=self.model.device)
        done = torch.isin(answers[-1], ends)
        while len(answers) < self.max_new_tokens and not done.all():
            answers.append(step(answers[-1]))
            done |= torch.isin(answers[-1], ends)
        return torch.cat(answers, dim=1)

    def _read_by_row(self, prompts: Prompts, ids: torch.Tensor, mask: torch.Tensor) -> Iterator[tuple]:
        """Let the model read prompts (B, T); yield the outputs of `read_tokens` for one part of the rows at a time."""
        for rows in split_batch(0, len(ids), ids.shape[1]):
            cache = make_cache(self.model)
            yield read_tokens(self.model, prompts.make_inputs, ids[rows], mask[rows], prompts.images[rows], cache)
            self._step.write(rows, cache)

    def _read_by_image(self, prompts: Prompts, ids: torch.Tensor, mask: torch.Tensor, prefix: int) -> Iterator[tuple]:
        """Do the same for prompts whose first `prefix` tokens belong to an image; they are read once for each image."""
        model, images = self.model, prompts.images
        firsts = [*(images.index(image) for image in sorted(set(images))), len(images)]
        for part in split_batch(0, len(firsts) - 1, prefix):
            heads, cache = firsts[part], make_cache(model)
            inputs = ids[heads, :prefix], mask[heads, :prefix], [images[row] for row in heads]
            read_tokens(model, prompts.make_inputs, *inputs, cache)
            rows = range(heads[0], firsts[part.stop])
            self._step.write(slice(rows.start, rows.stop), cache, [images[row] - images[heads[0]] for row in rows])
        for rows in split_batch(0, len(ids), ids.shape[1] - prefix):
            cache = self._step.select(rows, prefix)
            yield read_tokens(model, prompts.make_inputs, ids[rows], mask[rows], images[rows], cache, past=prefix)

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
            return *pad_left(prompts.tokens, _round_up(max(map(len, prompts.tokens)), unit), self.pad), 0
        prefix = max(prompts.prefixes)
        parts = (
            pad_left(beginnings, prefix, self.pad),
            pad_left(questions, _round_up(max(map(len, questions)), unit), self.pad),
        )
        ids, mask = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return ids, mask, prefix

    def _prepare_step(self, rows: int, width: int) -> "DecodingStep":
        """Return a step for prompts (rows, width) and their answers, the previous one if it has the shape."""
        length = _round_up(width + self.max_new_tokens, STATIC_UNIT)
        if not self._step or self._step.rows != rows or self._step.length < length:
            self._step = None  # frees its memory first
            self._step = DecodingStep(self.model, rows, length)
        return self._step


class DecodingStep:
    """Forward pass for one token of each row, after the tokens in a cache: (B, 1) → the next tokens (B, 1).

    A CUDA graph needs tensors of fixed address and size, so cache and mask have room for `length` tokens. The graph is
    recorded in the second pass, because the first one initializes kernels, which cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int):
        self.model, self.rows, self.length = model, rows, length
        layers = len(make_cache(model).layers)
        self.cache = Cache(layers=[StaticLayer(length) for _ in range(layers)])
        self.visible, self.hidden, dtype = True, False, torch.bool
        if _get_text_config(model)._attn_implementation == "eager":  # adds the mask to its logits
            self.visible, self.hidden, dtype = 0.0, torch.finfo(model.dtype).min, model.dtype
        self.mask = torch.zeros(rows, 1, 1, length, dtype=dtype, device=model.device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(1, dtype=torch.long, device=model.device)  # index of the next token in the cache
        self.positions: torch.Tensor | None = None  # (…, B, 1) of the next tokens for the position embedding
        self.is_ready, self.can_record = False, model.device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None

    def write(self, rows: slice, cache: Cache, sources: Sequence[int] | None = None) -> None:
        """Copy keys and values to the beginning of some rows, from the rows `sources` of a cache (None: from all)."""
        index = slice(None) if sources is None else torch.tensor(sources, device=self.tokens.device)
        for layer, source in zip(self.cache.layers, cache.layers, strict=True):
            if not layer.is_initialized:
                shape = (self.rows, -1, -1, -1)
                layer.lazy_initialization(source.keys[:1].expand(shape), source.values[:1].expand(shape))
            for target, values in ((layer.keys, source.keys), (layer.values, source.values)):
                target[rows, :, : values.shape[2]] = values[index]

    def select(self, rows: slice, length: int) -> Cache:
        """Return a cache of some rows, which have `length` tokens; its memory is this cache's."""
        layers = [copy(layer) for layer in self.cache.layers]
        for layer in layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            layer.cumulative_length = torch.full_like(layer.cumulative_length, length)
        return Cache(layers=layers)

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
        if self.is_ready and self.can_record and not self.graph:
            self._record()
        if self.graph:
            with torch.cuda.device(self.tokens.device):
                self.graph.replay()
        else:
            self._run()
            self.is_ready = True
        return self.tokens.clone()

    def _record(self) -> None:
        """Record the graph; its kernels do not run meanwhile, so they run later if they cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.tokens.device), torch.cuda.graph(graph):
                self._run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.can_record = False
            kind = self.model.config.model_type
            note(f"a model of type {kind} answers slowly, because a GPU cannot record its steps: {error}")
        else:
            self.graph = graph

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
        for layer in make_cache(model).layers
    )
    is_static = getattr(model.get_decoder(), "_can_compile_fullgraph", False) and kinds.isdisjoint(
        VALUE_DEPENDENT_ROPES
    )
    return sees_all and is_static and config._attn_implementation in ("sdpa", "eager")


def read_tokens(
    model: PreTrainedModel,
    make_inputs: MakeInputs,
    ids: torch.Tensor,
    mask: torch.Tensor,
    images: Sequence[int],
    cache: Cache,
    past: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the model read tokens after the `past` tokens in the cache, to which it adds keys and values.

    Args:
        ids: (b, T) of all tokens, as `mask`.
        images: index of each row's image.

    Returns:
        The logits (b, V) after the last token and its positions (…, b, 1).
    """
    inputs = make_inputs(ids, mask, images, not past)  # after a prefix, images are in the cache
    inputs["position_ids"] = _compute_positions(model, inputs)
    inputs |= {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    prepared = model.prepare_inputs_for_generation(
        **inputs,
        past_key_values=cache,
        next_sequence_length=ids.shape[1] - past,
        is_first_iteration=not past,
        use_cache=True,
    )
    return model(**prepared).logits[:, -1], prepared["position_ids"][..., -1:]


def pad_left(rows: Sequence[Sequence[int]], width: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and mask (B, width) of rows of tokens."""
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def find_end(ids: list[int], token: int) -> int:
    """Return the number of tokens up to the last `token`."""
    return len(ids) - ids[::-1].index(token)


def split_batch(begin: int, end: int, tokens: int) -> list[slice]:
    """Split rows, of `tokens` each, into parts of at most `TOKENS_AT_ONCE` tokens, or of one row."""
    size = max(1, TOKENS_AT_ONCE // tokens)
    return [slice(start, min(start + size, end)) for start in range(begin, end, size)]


def _compute_positions(model: PreTrainedModel, inputs: dict) -> torch.Tensor:
    """Return the positions (…, b, T) of tokens; some models' code reads single values, for which a GPU would wait."""
    on_cpu = {
        name: values.cpu()
        for name, values in inputs.items()
        if isinstance(values, torch.Tensor) and not values.is_floating_point()
    }
    return model._prepare_position_ids_for_generation(on_cpu["input_ids"], on_cpu).to(model.device)


def _get_text_config(model: PreTrainedModel):
    return model.config.get_text_config(decoder=True)


def make_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=_get_text_config(model))


def _round_up(length: int, unit: int) -> int:
    return ceil(length / unit) * unit
