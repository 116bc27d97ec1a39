"""Optimizers.

A DeepSpeed configuration that names none has AdamW with 8-bit states, for weights kept in bf16 alone. It needs 6 bytes
for each trained weight, gradient included, where mixed precision needs 16: a language model of 2.5 billion weights is
trained whole on a card of 24 GB, with nothing in host memory.
"""

import random
from collections.abc import Iterable

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.nn import Parameter

from dj2mgm.training.settings import TrainingSettings


def optimizer_of(settings: TrainingSettings) -> tuple[type, dict] | None:
    """Class and keyword arguments, as transformers' Trainer takes them; None where DeepSpeed's configuration names one.

    States are quantised block by block (Dettmers et al. 2022, arXiv:2110.02861). Weights are rounded to bf16 up or
    down at random, by how near they are: rounded to the nearest, most updates of a fine-tuning would be lost.
    """
    if "optimizer" in settings.deepspeed:
        return None
    return _adamw_8bit(settings.seed), {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "bf16_stochastic_round": True,
    }


def _adamw_8bit(seed: int) -> type[torch.optim.Optimizer]:
    from torchao import optim  # not at the top: it is a slow import that few runs need

    class AdamW8bit(optim.AdamW8bit):
        """Rounds alike on all processes, of which each has all of the weights and draws its own dropout, and after a
        resume.

        No second moment is rounded to zero (Li et al. 2023, arXiv:2309.01507): where the first moment is not zero but
        the gradient is, as in an embedding's row that a step does not meet, the update would be divided by eps alone.
        """

        @staticmethod
        def _subclass_zeros(p, signed, block_size):
            state = optim.AdamW8bit._subclass_zeros(p, signed, block_size)
            if not signed:
                state.qmap[0] = state.qmap[1] / 2  # zero only where the block's scale is, before the first step
            return state

        def step(self, closure=None):
            steps = max((int(state["step"]) for state in self.state.values()), default=0)
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(random.Random(f"{seed}/rounding/{steps}").getrandbits(63))
                return super().step(closure)

    return AdamW8bit


def repeat_products_of_betas(optimizer: DeepSpeedCPUAdam) -> None:
    """Give a resumed optimizer the bias corrections of one that was never stopped, bit for bit.

    It multiplies its powers of the betas step by step, keeps them outside of its state, and after a gap in the steps
    computes them by `pow`, which rounds otherwise. So steps that change nothing close the gap.
    """
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    [beta1, beta2] = optimizer.param_groups[0]["betas"]
    nothing = torch.zeros(1)
    for step in range(1, steps + 1):
        rates = (0.0, beta1, beta2, 1.0, 0.0, True)  # learning rate, betas, epsilon, weight decay, bias correction
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *rates, nothing, nothing, nothing, nothing)


def set_apart(groups: list[dict], parameters: Iterable[Parameter], **values: float) -> list[dict]:
    """An optimizer's parameter groups, with those `parameters` in groups of their own that have `values`, as lr and
    weight_decay. The first group is one of the others."""
    own = {id(parameter) for parameter in parameters}
    others = [group | {"params": [p for p in group["params"] if id(p) not in own]} for group in groups]
    theirs = [group | {"params": [p for p in group["params"] if id(p) in own]} | values for group in groups]
    return [group for group in (*others, *theirs) if group["params"]]
