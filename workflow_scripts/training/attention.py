"""The attention kernels that the language model is trained with."""

import torch
from transformers.utils import is_flash_attn_2_available

from training.settings import TrainingSettings


def attention_of(settings: TrainingSettings) -> tuple[str, str | None]:
    """transformers' name of the implementation, and what is to be said about the choice, if anything.

    `auto` is FlashAttention 2 where it can run: on a GPU, in bf16, with flash-attn installed. Elsewhere it is PyTorch's
    own attention, whose kernels are as fast on the newest GPUs (docs/performance.md).
    """
    if settings.attn_implementation != "auto":
        return settings.attn_implementation, None
    if not (torch.cuda.is_available() and settings.bf16):
        return "sdpa", None
    if is_flash_attn_2_available():
        return "flash_attention_2", None
    return "sdpa", "flash-attn is not installed: attention runs by PyTorch's scaled_dot_product_attention"
