"""How likely a model finds given answers about images."""

from collections.abc import Sequence

import torch
from torch.nn.functional import log_softmax

from dj2mgm.mgm.greedy_search import TOKENS_AT_ONCE, read_images, selected
from dj2mgm.mgm.modeling_mgm import MGMForConditionalGeneration
from dj2mgm.vision_language import IGNORED

LOGITS_AT_ONCE = 2**27  # 512 MiB in float32


@torch.inference_mode()
def answer_log_likelihoods(
    model: MGMForConditionalGeneration,
    prefix: Sequence[int],
    visual_tokens: torch.Tensor,
    images: Sequence[int],
    answers: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Of each of B answers, the log-likelihoods of its labelled tokens, in nats.

    Args:
        prefix: P tokens with which all conversations begin, an image's among them.
        visual_tokens: (I, N, H), of the images that are answered about.
        images: which of them each answer is about.
        answers: the tokens that follow the prefix.
        labels: the same, or `IGNORED` for tokens that are not looked at.
    """
    device = visual_tokens.device
    cache, first = read_images(model, torch.tensor(prefix, device=device), visual_tokens)
    width = max(map(len, answers))
    ids = torch.tensor([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in answers], device=device)
    wanted = torch.tensor([[*each, *[IGNORED] * (width - len(each))] for each in labels], device=device)
    size = max(1, min(TOKENS_AT_ONCE // (len(prefix) + width), LOGITS_AT_ONCE // (width * first.shape[1])))
    found: list[list[float]] = []
    parts = (tensor.split(size) for tensor in (torch.tensor(images, device=device), ids, wanted))
    for rows, tokens, targets in zip(*parts, strict=True):
        logits = first[rows].unsqueeze(1)  # (b, 1, V): what follows the prefix
        if width > 1:  # what stands to the right of a token is not seen by it, so padding needs no mask
            output = model(input_ids=tokens[:, :-1], past_key_values=selected(cache, rows), use_cache=True)
            logits = torch.cat([logits, output.logits], dim=1)
        values = log_softmax(logits.float(), dim=-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
        shown = targets != IGNORED
        found += [row[seen].tolist() for row, seen in zip(values.cpu(), shown.cpu(), strict=True)]
    return found
