"""Greedy search for answers to many questions about images.

The prefix of a prompt, mainly its image's tokens, is computed once for each image; its keys and values serve all
questions about the image.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicLayer, StaticLayer

from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.models.questions import cut_at_stop

TOKENS_AT_ONCE = 2**14  # in one forward pass; enough to keep a GPU busy, while activations stay small
# Answers of at least this many tokens are decoded with a CUDA graph. Kernels for one token per row are so small that
# the GPU would otherwise wait for their launches, and attention kernels would be planned again for each length.
MIN_RECORDED = 4


@torch.inference_mode()
def greedy_search(
    model: MGMForConditionalGeneration,
    prefix: Sequence[int],
    visual_tokens: torch.Tensor | None,
    images: Sequence[int],
    questions: Sequence[Sequence[int]],
    width: int,
    stops: Sequence[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the answer to each of B questions as token ids, up to the first of `stops`.

    Args:
        prefix: p tokens with which all prompts begin, including the image token.
        visual_tokens: (I, N, H) of the images; None if the prefix contains no image.
        images: index of each question's image; zeros without images.
        questions: the tokens after the prefix. Either all questions have such tokens or none has.
        width: length to which questions are padded. It must equal their own length if the attention window is shorter
            than a prompt with its answer.
        max_new_tokens: length at which an answer is cut.
    """
    device, rows = model.device, torch.tensor(images, device=model.device)
    # padded on the left, between image and question, so that all questions end at the same position
    padded = [[stops[0]] * (width - len(ids)) + list(ids) for ids in questions]
    positions = torch.arange(len(prefix) + width)
    begins = torch.tensor([[len(prefix) + width - len(ids)] for ids in questions])
    mask = ((positions < len(prefix)) | (positions >= begins)).long().to(device)
    cache, logits = read_images(model, torch.tensor(prefix, device=device), visual_tokens)
    if width:
        cache, logits = _read_questions(model, cache, len(logits), rows, torch.tensor(padded, device=device), mask)
    else:
        cache.batch_select_indices(rows)
        logits = logits.index_select(0, rows)

    ends, answers = torch.tensor(stops, device=device), []
    done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    reader = RecordedReader if max_new_tokens >= MIN_RECORDED and _can_be_recorded(model, cache) else Reader
    read = reader(model, cache, mask, max_new_tokens)
    while True:
        answers.append(logits.argmax(dim=-1))
        done |= torch.isin(answers[-1], ends)
        if len(answers) == max_new_tokens or done.all():
            return [cut_at_stop(answer, set(stops)) for answer in torch.stack(answers, dim=1).tolist()]
        logits = read(answers[-1])


class Reader:
    """Forward pass for the next token of each row, after the tokens in the cache: (B,) → logits (B, V).

    Args:
        cache: keys and values of the tokens so far.
        mask: (B, T) of the tokens in the cache.
        tokens: maximum number of tokens that will be read.
    """

    def __init__(self, model: MGMForConditionalGeneration, cache: Cache, mask: torch.Tensor, tokens: int):
        self.model, self.cache, self.mask = model, cache, mask

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = pad(self.mask, (0, 1), value=1)
        return _read(self.model, self.cache, tokens.unsqueeze(1), self.mask)


class RecordedReader:
    """A `Reader` that records a GPU's work for one token as a CUDA graph and replays it for the others.

    A graph needs tensors of fixed address and size, so cache and mask have room for all tokens from the start. The
    layers of `cache` are emptied one by one while they are copied.
    """

    def __init__(self, model: MGMForConditionalGeneration, cache: Cache, mask: torch.Tensor, tokens: int):
        length = mask.shape[1]
        self.model, self.cache = model, cache
        cache.layers = [_make_room(layer, tokens) for layer in cache.layers]
        self.mask = pad(mask, (0, tokens))[:, None, None].bool()  # (B, 1, 1, T + tokens)
        self.position = torch.tensor([length], device=mask.device)
        self.positions = mask.sum(dim=1, keepdim=True)
        self.tokens = torch.zeros_like(self.positions)
        self.logits: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens.unsqueeze(1))
        if self.logits is None or not tokens.is_cuda:  # the first pass initializes kernels, which cannot be recorded
            self.logits = self._step()
            return self.logits
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(tokens.device), torch.cuda.graph(self.graph):
                self.logits = self._step()
        with torch.cuda.device(tokens.device):
            self.graph.replay()
        return self.logits

    def _step(self) -> torch.Tensor:
        self.mask.index_fill_(3, self.position, True)
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.position.add_(1)
        self.positions.add_(1)
        return output.logits[:, -1]


def _can_be_recorded(model: MGMForConditionalGeneration, cache: Cache) -> bool:
    """Return whether a GPU runs the model, no control flow depends on values, and attention has no window."""
    language_model = model.model.language_model
    rope = (getattr(language_model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    is_dynamic = not language_model._can_compile_fullgraph or rope in ("dynamic", "longrope")
    has_no_window = all(type(layer) is DynamicLayer for layer in cache.layers)
    takes_mask = language_model.config._attn_implementation == "sdpa"  # only SDPA takes a boolean mask
    return model.device.type == "cuda" and has_no_window and takes_mask and not is_dynamic


def _make_room(layer: DynamicLayer, tokens: int) -> StaticLayer:
    """Return a layer with the same keys and values and room for `tokens` more; `layer` is emptied."""
    length = layer.get_seq_length()
    static = StaticLayer(length + tokens)
    static.lazy_initialization(layer.keys, layer.values)
    static.update(layer.keys, layer.values)
    layer.keys = layer.values = None
    return static


def read_images(
    model: MGMForConditionalGeneration, prefix: torch.Tensor, visual_tokens: torch.Tensor | None
) -> tuple[Cache, torch.Tensor]:
    """Return the cache of the prefix with each of I images, and the logits (I, V) after it; I is 1 without images."""
    caches, logits = [], []
    parts = [None] if visual_tokens is None else visual_tokens.split(max(1, TOKENS_AT_ONCE // len(prefix)))
    for images in parts:
        ids = prefix.expand(1 if images is None else len(images), -1)
        output = model(input_ids=ids, visual_tokens=images, use_cache=True, logits_to_keep=1)
        caches.append(output.past_key_values)
        logits.append(output.logits[:, -1])
    return _concatenate_caches(caches), torch.cat(logits)


def _read_questions(
    model: MGMForConditionalGeneration,
    prefixes: Cache,
    images: int,
    rows: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[Cache, torch.Tensor]:
    """Return the cache of image and question, and the logits (B, V) after them.

    Args:
        prefixes: cache of the images' prefixes.
        rows: (B,) index of each question's image.
        ids: (B, S) tokens of the questions.
        mask: (B, P + S) of prefix and question.
    """
    size = max(1, TOKENS_AT_ONCE // ids.shape[1])
    if len(ids) <= size and rows.tolist() == list(range(images)):  # one question per image needs no copies
        return prefixes, _read(model, prefixes, ids, mask)
    caches, logits = [], []
    for rows_, ids_, mask_ in zip(rows.split(size), ids.split(size), mask.split(size), strict=True):
        caches.append(select_rows(prefixes, rows_))
        logits.append(_read(model, caches[-1], ids_, mask_))
    return _concatenate_caches(caches), torch.cat(logits)


def _read(model: MGMForConditionalGeneration, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run the model on tokens (B, t) after those in the cache: ids, mask (B, T + t) of all → logits (B, V)."""
    positions = (mask.cumsum(dim=1) - 1)[:, -ids.shape[1] :]
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions.clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def select_rows(cache: Cache, rows: torch.Tensor) -> Cache:
    """Return a cache of some rows; `cache` itself does not change."""
    selected = copy(cache)
    selected.layers = [copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
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
