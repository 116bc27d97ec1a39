"""Log-likelihoods of given answers about images."""

from collections.abc import Sequence

import torch
from torch.nn.functional import log_softmax

from dj2mgm.models.greedy_search import TOKENS_AT_ONCE, MakeInputs, concatenate_caches, read_in_parts, select_rows
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
    prefixes = torch.tensor(prefix).expand(max(images) + 1, -1)
    parts = list(read_in_parts(model, make_inputs, prefixes, torch.ones_like(prefixes)))
    first, cache = torch.cat([part.logits for part in parts]), concatenate_caches([part.cache for part in parts])
    width = max(map(len, answers))
    ids = torch.tensor([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in answers], device=device)
    labels = torch.tensor([[*targets, *[IGNORE_INDEX] * (width - len(targets))] for targets in labels], device=device)
    size = max(1, min(TOKENS_AT_ONCE // (len(prefix) + width), LOGITS_AT_ONCE // (width * first.shape[1])))
    log_likelihoods: list[list[float]] = []
    for start in range(0, len(ids), size):
        rows, tokens, targets = (values[start : start + size] for values in (images, ids, labels))
        logits = first[list(rows)].unsqueeze(1)  # (b, 1, V), after the prefix
        if width > 1:  # padding on the right needs no mask under causal attention
            output = model(input_ids=tokens[:, :-1], past_key_values=select_rows(cache, rows), use_cache=True)
            logits = torch.cat([logits, output.logits], dim=1)
        values = log_softmax(logits.float(), dim=-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
        counted = targets != IGNORE_INDEX
        log_likelihoods += [row[mask].tolist() for row, mask in zip(values.cpu(), counted.cpu(), strict=True)]
    return log_likelihoods
