"""Log-likelihoods of the captions that a beam search finds, and of given answers, for many images at once.

The beam search is that of transformers' `generate` (`num_beams`, `length_penalty` 1, `early_stopping` False); tests
compare the two. `generate` returns likelihoods only with the scores of every step, 262 MB a step for 64 images, 4 beams
and Gemma's vocabulary of 256 000, and it encodes every image once for each beam.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch.nn.functional import log_softmax
from transformers import Cache

from dj2mgm.models.greedy_search import TOKENS_AT_ONCE, MakeInputs, make_cache, read_tokens, split_rows
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.models.questions import cut_at_stop
from dj2mgm.models.vision_language import IGNORE_INDEX

# token ids before the stop token, and the log-likelihood in nats including the stop token
Hypothesis = tuple[list[int], float]
LOGITS_AT_ONCE = 2**27  # 512 MiB in float32


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
