"""Greedy answers to many questions about images. What stands before the questions, an image's tokens above all, is
computed once for each image, whatever is asked about it; its keys and values serve all its questions."""

from collections.abc import Sequence
from copy import copy

import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicLayer, StaticLayer

from dj2mgm.mgm.modeling_mgm import MGMForConditionalGeneration

TOKENS_AT_ONCE = 2**14  # that enter the model together: enough to keep a GPU busy, and their activations stay small
# Tokens of an answer from which a GPU's work for one of them is recorded and repeated. Kernels for one token a row are
# so small that the GPU otherwise waits for the next one, and those of attention are planned once for each length.
RECORDED = 4


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
    """The answer to each of B questions as token ids, up to the first of `stops`.

    Args:
        prefix: P tokens with which all prompts begin, an image's among them.
        visual_tokens: (I, N, H), of the images that are asked about; None: of none, and the prefix holds no image.
        images: which of them each question is about; zeros where there are none.
        questions: the tokens that follow the prefix; all of them have some, or none has.
        width: that they are padded to; their own, if attention slides over a window shorter than a prompt with its
            answer.
    """
    device, rows = model.device, torch.tensor(images, device=model.device)
    # padded on the left, between image and question, so that all questions end together
    padded = [[stops[0]] * (width - len(ids)) + list(ids) for ids in questions]
    mask = torch.tensor([[1] * len(prefix) + [0] * (width - len(ids)) + [1] * len(ids) for ids in questions])
    mask = mask.to(device)
    cache, logits = read_images(model, torch.tensor(prefix, device=device), visual_tokens)
    if width:
        cache, logits = _read_questions(model, cache, len(logits), rows, torch.tensor(padded, device=device), mask)
    else:
        cache.batch_select_indices(rows)
        logits = logits.index_select(0, rows)

    ends, answers = torch.tensor(stops, device=device), []
    done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    reader = RecordedReader if max_new_tokens >= RECORDED and _can_be_recorded(model, cache) else Reader
    read = reader(model, cache, mask, max_new_tokens)
    while True:
        answers.append(logits.argmax(dim=-1))
        done |= torch.isin(answers[-1], ends)
        if len(answers) == max_new_tokens or done.all():
            return [_until(answer, set(stops)) for answer in torch.stack(answers, dim=1).tolist()]
        logits = read(answers[-1])


class Reader:
    """Reads one more token of each row, behind what is in the cache: (B,) → logits (B, V)."""

    def __init__(self, model: MGMForConditionalGeneration, cache: Cache, mask: torch.Tensor, tokens: int):
        self.model, self.cache, self.mask = model, cache, mask

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = pad(self.mask, (0, 1), value=1)
        return _read(self.model, self.cache, tokens.unsqueeze(1), self.mask)


class RecordedReader:
    """A `Reader` that records what a GPU does for a token, and has it done again for all others (a CUDA graph).

    Nothing changes its place or size meanwhile: the cache and its mask have room for all tokens from the first on.

    Args:
        cache: used up, layer by layer.
        mask: (B, T), of what is in the cache.
        tokens: how many will be read at most.
    """

    def __init__(self, model: MGMForConditionalGeneration, cache: Cache, mask: torch.Tensor, tokens: int):
        length = mask.shape[1]
        self.model, self.cache = model, cache
        cache.layers = [_with_room(layer, tokens) for layer in cache.layers]
        self.mask = pad(mask, (0, tokens))[:, None, None].bool()  # (B, 1, 1, T + tokens)
        self.place = torch.tensor([length], device=mask.device)
        self.positions = mask.sum(dim=1, keepdim=True)
        self.tokens = torch.zeros_like(self.positions)
        self.logits: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens.unsqueeze(1))
        if self.logits is None or not tokens.is_cuda:  # the first time makes ready what cannot be recorded
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
        self.mask.index_fill_(3, self.place, True)
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.place.add_(1)
        self.positions.add_(1)
        return output.logits[:, -1]


def _can_be_recorded(model: MGMForConditionalGeneration, cache: Cache) -> bool:
    """Whether a GPU runs it, the language model decides nothing by its values, and attention reaches everything."""
    language_model = model.model.language_model
    rope = (getattr(language_model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    decides = not language_model._can_compile_fullgraph or rope in ("dynamic", "longrope")
    reaches = all(type(layer) is DynamicLayer for layer in cache.layers)
    masked = language_model.config._attn_implementation == "sdpa"  # which takes a mask of booleans
    return model.device.type == "cuda" and reaches and masked and not decides


def _with_room(layer: DynamicLayer, tokens: int) -> StaticLayer:
    """The same keys and values, and room for so many more."""
    length = layer.get_seq_length()
    roomy = StaticLayer(length + tokens)
    roomy.lazy_initialization(layer.keys, layer.values)
    roomy.update(layer.keys, layer.values)
    layer.keys = layer.values = None
    return roomy


def read_images(
    model: MGMForConditionalGeneration, prefix: torch.Tensor, visual_tokens: torch.Tensor | None
) -> tuple[Cache, torch.Tensor]:
    """Keys and values of the prefix with each image, and what follows it: logits (I, V); I is 1 without an image."""
    caches, logits = [], []
    parts = [None] if visual_tokens is None else visual_tokens.split(max(1, TOKENS_AT_ONCE // len(prefix)))
    for images in parts:
        ids = prefix.expand(1 if images is None else len(images), -1)
        output = model(input_ids=ids, visual_tokens=images, use_cache=True, logits_to_keep=1)
        caches.append(output.past_key_values)
        logits.append(output.logits[:, -1])
    return _joined(caches), torch.cat(logits)


def _read_questions(
    model: MGMForConditionalGeneration,
    of_images: Cache,
    images: int,
    rows: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[Cache, torch.Tensor]:
    """Keys and values of image and question, and what follows: (B, V).

    Args:
        of_images: the cache of so many images' prefixes.
        rows: (B,), which of them each question is about.
        ids: (B, S), and mask (B, P + S).
    """
    size = max(1, TOKENS_AT_ONCE // ids.shape[1])
    if len(ids) <= size and rows.tolist() == list(range(images)):  # an image each: no copies
        return of_images, _read(model, of_images, ids, mask)
    caches, logits = [], []
    for rows_, ids_, mask_ in zip(rows.split(size), ids.split(size), mask.split(size), strict=True):
        caches.append(selected(of_images, rows_))
        logits.append(_read(model, caches[-1], ids_, mask_))
    return _joined(caches), torch.cat(logits)


def _read(model: MGMForConditionalGeneration, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """More tokens ids (B, t) behind what is in the cache, of all of which mask (B, …) says what counts → (B, V)."""
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


def selected(cache: Cache, rows: torch.Tensor) -> Cache:
    """Of a cache that is kept."""
    selected = copy(cache)
    selected.layers = [copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def _joined(caches: list[Cache]) -> Cache:
    """Their rows one after another; the caches are used up, layer by layer, so that little is there twice."""
    first, *others = caches
    for layers in zip(*(cache.layers for cache in caches), strict=True) if others else ():
        for name in ("keys", "values"):
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)
    return first


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first that ends an answer."""
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
