"""Beam search over many images at once, with the log-likelihood of every caption it finds.

The search is that of transformers' `generate` (`num_beams`, `length_penalty` 1, `early_stopping` False), and the tests
hold it to that. `generate` tells likelihoods only together with every step's scores, which for 64 images and 4 beams
under Gemma's 256 000 words are 262 MB a step; and it encodes every image once for each beam.
"""

import torch
from torch.nn.functional import log_softmax

from dj2mgm.mgm.modeling_mgm import MGMForConditionalGeneration

Hypothesis = list[
    tuple[list[int], float]
]  # token ids up to the stop token, and the log-likelihood in nats including it


@torch.inference_mode()
def beam_search(
    model: MGMForConditionalGeneration,
    input_ids: torch.Tensor,
    visual_tokens: torch.Tensor,
    num_beams: int,
    stops: list[int],
    max_new_tokens: int,
) -> list[Hypothesis]:
    """Up to `num_beams` continuations of each prompt, the highest log-likelihood per token first.

    Args:
        input_ids: (B, T) prompts of equal length, so without padding.
        visual_tokens: (B, N, H), of the prompts' images.
        stops: tokens that end a continuation; one that reaches `max_new_tokens` is cut there.
    """
    batch, device = len(input_ids), input_ids.device
    ends = torch.tensor(stops, device=device)
    output = model(input_ids=input_ids, visual_tokens=visual_tokens, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    cache.batch_repeat_interleave(num_beams)  # the prompt and its image are computed once for all beams

    running = torch.empty(batch, 1, 0, dtype=torch.long, device=device)  # (B, beams, steps); at first one empty beam
    scores = torch.zeros(batch, 1, device=device)
    sequences = torch.empty(batch, num_beams, 0, dtype=torch.long, device=device)
    means = torch.full((batch, num_beams), -torch.inf, device=device)  # log-likelihood per token; −∞ is a free place
    totals = torch.full((batch, num_beams), -torch.inf, device=device)
    done = torch.zeros(batch, 1, dtype=torch.bool, device=device)

    for step in range(1, max_new_tokens + 1):
        log_probs = log_softmax(output.logits[:, -1].float(), dim=-1)
        words = log_probs.shape[-1]
        log_probs = log_probs.view(batch, -1, words) + scores.unsqueeze(-1)
        # so many that `num_beams` are left to go on with, whichever of them stop
        best, places = log_probs.flatten(1).topk(min((1 + len(stops)) * num_beams, log_probs[0].numel()))
        tokens = (places % words).unsqueeze(-1)
        grown = torch.cat([_rows(running, places // words), tokens], dim=-1)  # (B, kept, steps)
        stopped = torch.isin(tokens.squeeze(-1), ends) | (step == max_new_tokens)

        finished = stopped[:, :num_beams] & ~done
        means = torch.cat([means, (best[:, :num_beams] / step).where(finished, -torch.inf)], dim=1)
        totals = torch.cat([totals, best[:, :num_beams]], dim=1)
        sequences = torch.cat([torch.nn.functional.pad(sequences, (0, 1), value=stops[0]), grown[:, :num_beams]], dim=1)
        means, order = means.topk(num_beams)
        totals, sequences = totals.gather(1, order), _rows(sequences, order)

        scores, order = best.masked_fill(stopped, -torch.inf).topk(num_beams)
        running = _rows(grown, order)
        # a longer continuation is less likely as a whole: the best one, taken per token so far, bounds the others
        done |= means[:, -1:] >= scores[:, :1] / step
        if done.all() or step == max_new_tokens:
            break
        parents = (places // words).gather(1, order)
        if step > 1:  # before, all beams are the prompt
            cache.reorder_cache((parents + num_beams * torch.arange(batch, device=device).unsqueeze(1)).flatten())
        output = model(
            input_ids=running[:, :, -1].reshape(-1, 1), past_key_values=cache, use_cache=True, logits_to_keep=1
        )

    ends_at = set(stops)
    return [
        [(_until(tokens, ends_at), total) for tokens, mean, total in zip(*row, strict=True) if mean > -torch.inf]
        for row in zip(sequences.tolist(), means.tolist(), totals.tolist(), strict=True)
    ]


def _rows(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """values (B, K, steps), order (B, k) → (B, k, steps)."""
    return values.gather(1, order.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first that ends a continuation."""
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
