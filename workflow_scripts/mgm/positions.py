"""Which of a batch's tokens stand for images, and which predict an answer."""

import torch
import torch.nn.functional as F

IGNORED = -100  # label of tokens that carry no loss


def positions_of_images(input_ids: torch.LongTensor, image_token_id: int) -> torch.LongTensor:
    """input_ids (B, T) → flat indices of the image tokens, in order."""
    return (input_ids.flatten() == image_token_id).nonzero().squeeze(1)


def positions_of_answers(labels: torch.LongTensor) -> torch.LongTensor:
    """labels (B, T) → flat indices of the tokens whose next label is not `IGNORED`."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    return (following != IGNORED).nonzero().squeeze(1)
