"""Arguments of transformers' Trainer for a training stage."""

import math
import os
from pathlib import Path

import torch
from transformers import TrainingArguments

from dj2mgm.training.deepspeed_config import complete_deepspeed_config
from dj2mgm.training.settings import TrainingSettings


def build_training_arguments(settings: TrainingSettings, folder: Path, hidden_size: int) -> TrainingArguments:
    """Build the arguments of a stage without "auto" settings, which also initialize the process group.

    `folder` is that of the checkpoints, `hidden_size` the language model's.
    """
    checkpointing, workers = settings.activation_checkpointing, settings.loader_workers
    # all micro batches of a step are read at once, so they are decoded while the step before is computed
    prefetched = max(1, math.ceil(settings.gradient_accumulation_steps / workers)) if workers else None
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder.parent / "tensorboard")
    return TrainingArguments(
        output_dir=str(folder),
        deepspeed=complete_deepspeed_config(settings.deepspeed, hidden_size),
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
