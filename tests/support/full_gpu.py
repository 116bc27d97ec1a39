"""Run stage 1, and fill the last process's GPU in its third step, unless a file says that this has happened.

The process that runs out of memory starts again with this script and the same arguments.
"""

import os
from pathlib import Path

import torch

import pretrain
from dj2mgm.training.trainer import ResumableTrainer

FULL_AT = 3  # step


def fill_gpu_once(happened: Path) -> None:
    compute_step = ResumableTrainer.training_step

    def fill_or_step(trainer, *args, **kwargs):
        if trainer.state.global_step == FULL_AT - 1 and not happened.exists():
            happened.touch()
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return compute_step(trainer, *args, **kwargs)

    ResumableTrainer.training_step = fill_or_step


if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        fill_gpu_once(Path(os.environ["FULL_GPU_FILE"]))
    pretrain.main()
