"""Log-likelihoods of given answers about images."""

from collections.abc import Sequence

import torch
from torch.nn.functional import log_softmax

from dj2mgm.models.mgm.greedy_search import TOKENS_AT_ONCE, read_images, select_rows
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.models.vision_language import IGNORE_INDEX

LOGITS_AT_ONCE = 2**27  # 512 MiB in float32


@torch.inference_mode()
def compute_answer_log_likelihoods(
    model: MGMForConditionalGeneration,
    prefix: Sequence[int],
    visual_tokens: torch.Tensor | None,
    images: Sequence[int],
    answers: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Return the log-likelihoods of each answer's labelled tokens in nats.

    Args:
        prefix: p tokens with which all conversations begin, including the image token.
        visual_tokens: (I, N, H) of the images; None for conversations without an image.
        images: index of each answer's image; 0 without images.
        answers: the tokens after the prefix.
        labels: the same tokens, or `IGNORE_INDEX` for tokens that do not count.
    """
    device = model.device
    cache, first = read_images(model, torch.tensor(prefix, device=device), visual_tokens)
    width = max(map(len, answers))
    ids = torch.tensor([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in answers], device=device)
    labels = torch.tensor([[*targets, *[IGNORE_INDEX] * (width - len(targets))] for targets in labels], device=device)
    size = max(1, min(TOKENS_AT_ONCE // (len(prefix) + width), LOGITS_AT_ONCE // (width * first.shape[1])))
    log_likelihoods: list[list[float]] = []
    parts = (tensor.split(size) for tensor in (torch.tensor(images, device=device), ids, labels))
    for rows, tokens, targets in zip(*parts, strict=True):
        logits = first[rows].unsqueeze(1)  # (b, 1, V), after the prefix
        if width > 1:  # padding on the right needs no mask under causal attention
            output = model(input_ids=tokens[:, :-1], past_key_values=select_rows(cache, rows), use_cache=True)
            logits = torch.cat([logits, output.logits], dim=1)
        values = log_softmax(logits.float(), dim=-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
        counted = targets != IGNORE_INDEX
        log_likelihoods += [row[mask].tolist() for row, mask in zip(values.cpu(), counted.cpu(), strict=True)]
    return log_likelihoods
