"""Log-likelihoods of given answers about images."""

from collections.abc import Sequence
from copy import copy

import torch
from torch.nn.functional import log_softmax
from transformers import Cache

from dj2mgm.models.greedy_search import TOKENS_AT_ONCE, MakeInputs, make_cache, read_tokens, split_rows
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.models.vision_language import IGNORE_INDEX

LOGITS_AT_ONCE = 2**27  # 512 MiB in float32


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
    for rows in split_rows(0, count, len(prefix)):
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
