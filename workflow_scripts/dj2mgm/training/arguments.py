"""Arguments of transformers' Trainer for a training stage, and its optimizers with their parameter groups.

If a DeepSpeed configuration names no optimizer, AdamW with 8-bit states trains weights that are kept in bf16 only. It
needs 6 bytes for each trained weight, including the gradient, while mixed precision needs 16. That is enough for full
fine-tuning of a language model of 2.5 billion weights on a card of 24 GB, without host memory.
"""

import math
import os
import random
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from torch.nn import Parameter
from torch.utils.cpp_extension import get_cxx_compiler
from transformers import TrainingArguments

from dj2mgm.cli.messages import note, report_activity
from dj2mgm.torch_environment import is_first_here, locate_extensions
from dj2mgm.training.build_locks import guard_wait_for_locks
from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.settings import TrainingSettings

MAX_REASON_LENGTH = 200  # characters


def build_training_arguments(settings: TrainingSettings, folder: Path, hidden_size: int) -> TrainingArguments:
    """Build the arguments of a stage without "auto" settings, which also initialize the process group.

    `folder` is the folder of the checkpoints, `hidden_size` the language model's hidden size.
    """
    checkpointing, workers = settings.activation_checkpointing, settings.workers
    # all micro batches of a step are read at once, so they are decoded while the step before is computed
    prefetched = max(1, math.ceil(settings.gradient_accumulation_steps / workers)) if workers else None
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder.parent / "tensorboard")
    return TrainingArguments(
        output_dir=str(folder),
        deepspeed=use_available_extensions(complete_deepspeed_config(settings.deepspeed, hidden_size)),
        use_cpu=not torch.cuda.is_available(),
        # DeepSpeed's mixed precision, which keeps float32 copies of the trained weights
        bf16=settings.bf16 and settings.deepspeed["bf16"]["enabled"] == "auto",
        per_device_train_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler,
        warmup_steps=settings.warmup_ratio,  # a share of all steps if below 1
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        activation_checkpointing=bool(checkpointing),
        activation_checkpointing_kwargs={"use_reentrant": False, "every_n_layers": int(checkpointing)},
        save_strategy="steps",
        save_steps=settings.save_steps,
        logging_steps=settings.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it waits for the GPU at every micro batch, and hides the cause of a failure
        dataloader_num_workers=workers,
        dataloader_prefetch_factor=prefetched,
        remove_unused_columns=False,
        report_to=[name for name in settings.trackers if name == "tensorboard"],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
    )


def use_available_extensions(config: dict) -> dict:
    """Return a DeepSpeed configuration without extensions for CPUs that cannot be compiled or loaded here.

    PyTorch's AdamW then replaces DeepSpeed's, and processes on CPUs exchange gradients without DeepSpeed's shared
    memory. Extensions are compiled now if they are not yet. It is called before the process group is initialized,
    which loads the extension for shared memory.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and _find_failure(ShareMemCommBuilder()):
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    optimizer, offload = config.get("optimizer"), config["zero_optimization"].get("offload_optimizer", {})
    on_cpu = not has_gpu or offload.get("device") == "cpu"
    if not optimizer or optimizer["params"].get("torch_adam") or not on_cpu:
        return config
    failure = _find_failure(CPUAdamBuilder())
    if failure is None:
        return config
    if is_first_here():
        note(
            f"{failure}, so PyTorch's AdamW on the CPU replaces DeepSpeed's, which would be several times faster "
            "for large models; install g++ to have it"
        )
    return config | {
        "optimizer": optimizer | {"params": optimizer["params"] | {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }


def _find_failure(builder: OpBuilder) -> str | None:
    """Load an extension, and return the reason in one line if that fails."""
    folder = locate_extensions() / builder.name
    if not (folder / f"{builder.name}.so").exists():
        is_locked = (folder / "lock").exists()
        report_activity(
            f"waiting for another process to compile {builder.name}"
            if is_locked
            else f"compiling {builder.name} (once, a minute or two)"
        )
    try:
        with guard_wait_for_locks():
            builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        if not shutil.which(get_cxx_compiler()):
            return "there is no C++ compiler"
        return f"{get_cxx_compiler()} cannot compile DeepSpeed's {builder.name} ({_find_reason(str(error))})"
    return None


def _find_reason(printed: str) -> str:
    """Return the compiler's first error in the output of a build, or its last line."""
    lines = printed.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line), lines[-1]).strip()[:MAX_REASON_LENGTH]


def choose_optimizer(settings: TrainingSettings) -> tuple[type, dict] | None:
    """Return class and arguments of an optimizer for transformers' Trainer; None if DeepSpeed's configuration has one.

    States are quantized block by block (Dettmers et al. 2022, arXiv:2110.02861). Weights are rounded to bf16
    stochastically, because rounding to the nearest value would lose most updates of a fine-tuning.
    """
    if "optimizer" in settings.deepspeed:
        return None
    return _make_adamw_8bit(settings.seed), {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "bf16_stochastic_round": True,
    }


def _make_adamw_8bit(seed: int) -> type[torch.optim.Optimizer]:
    """Return torchao's AdamW with 8-bit states, whose rounding depends on the seed and the step only."""
    from torchao import optim  # imported here, because it is slow and few runs need it

    class AdamW8bit(optim.AdamW8bit):
        """AdamW with 8-bit states that rounds in the same way on all processes, and after a resume.

        Rounding has random numbers of its own, because dropout draws other ones on each process. No second moment is
        rounded to zero (Li et al. 2023, arXiv:2309.01507). With a zero, an update by the first moment alone would be
        divided by eps, for example the update of an embedding's row that a step does not use.
        """

        @staticmethod
        def _subclass_zeros(p, signed, block_size):
            state = optim.AdamW8bit._subclass_zeros(p, signed, block_size)
            if not signed:
                state.qmap[0] = state.qmap[1] / 2  # zero only if the block's scale is, before the first step
            return state

        def step(self, closure=None):
            steps = max((int(state["step"]) for state in self.state.values()), default=0)
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(random.Random(f"{seed}/rounding/{steps}").getrandbits(63))
                return super().step(closure)

    return AdamW8bit


def repeat_products_of_betas(optimizer: DeepSpeedCPUAdam) -> None:
    """Give a resumed optimizer the same bias corrections, bit by bit, as one that was never stopped.

    The optimizer multiplies the powers of its betas step by step and keeps them outside of its state. After a gap in
    the steps it computes them by `pow`, which rounds differently. Steps that change nothing fill the gap.
    """
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    [beta1, beta2] = optimizer.param_groups[0]["betas"]
    zeros = torch.zeros(1)
    for step in range(1, steps + 1):
        rates = (0.0, beta1, beta2, 1.0, 0.0, True)  # learning rate, betas, epsilon, weight decay, bias correction
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *rates, zeros, zeros, zeros, zeros)


def split_groups(groups: list[dict], parameters: Iterable[Parameter], **values: float) -> list[dict]:
    """Split an optimizer's parameter groups so that `parameters` have groups of their own, after the others.

    `values` are settings of the new groups, such as lr and weight_decay.
    """
    own_ids = {id(parameter) for parameter in parameters}
    remaining_groups = [group | {"params": [p for p in group["params"] if id(p) not in own_ids]} for group in groups]
    new_groups = [group | {"params": [p for p in group["params"] if id(p) in own_ids]} | values for group in groups]
    return [group for group in (*remaining_groups, *new_groups) if group["params"]]
