"""The optimizer of a DeepSpeed configuration that names none: AdamW with 8-bit states, for weights kept in bf16 alone.

It needs 6 bytes for each trained weight, gradient included, where mixed precision needs 16: a language model of 2.5
billion weights is trained whole on a card of 24 GB, with nothing in host memory.
"""

from training.settings import TrainingSettings


def optimizer_of(settings: TrainingSettings) -> tuple[type, dict] | None:
    """Class and keyword arguments, as transformers' Trainer takes them; None where DeepSpeed's configuration names one.

    States are quantised block by block (Dettmers et al. 2022, arXiv:2110.02861). Weights are rounded to bf16 up or
    down at random, by how near they are: rounded to the nearest, most updates of a fine-tuning would be lost.
    """
    if "optimizer" in settings.deepspeed:
        return None
    from torchao.optim import AdamW8bit  # not at the top: it is a slow import that few runs need

    return AdamW8bit, {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "bf16_stochastic_round": True,
    }
