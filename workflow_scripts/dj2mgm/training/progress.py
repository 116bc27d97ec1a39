"""Training progress, for the console and `watch.py`."""

import time
from pathlib import Path

from transformers import TrainerCallback

from dj2mgm.errors import InputError
from dj2mgm.files import write_json
from dj2mgm.messages import report_progress


class ProgressLines(TrainerCallback):
    """Callback that prints a line of progress at each logging step, and writes it as JSON.

    Args:
        file: JSON file of the newest progress.
    """

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(self, args, state, control, **kwargs):
        self.start, self.first_step = time.monotonic(), state.global_step
        if state.max_steps <= args.get_warmup_steps(state.max_steps):
            raise InputError(
                f"the samples are enough for {state.max_steps} steps only, all of which are warm-up, so nothing would "
                "be trained. Use more samples, lower global_batch_size together with micro_batch_size, or set "
                "warmup_ratio: 0 for pretrain and finetune"
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "loss" not in logs:
            return
        seconds = time.monotonic() - self.start
        progress = {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "loss": float(logs["loss"]),
            "learning_rate": float(logs["learning_rate"]),
            "seconds": round(seconds, 1),
            "seconds_left": round(
                seconds / max(1, state.global_step - self.first_step) * (state.max_steps - state.global_step), 1
            ),
        }
        write_json(self.file, progress)
        detail = "loss {loss:.4f}, learning rate {learning_rate:.2e}".format(**progress)
        report_progress("steps", progress["step"], progress["max_steps"], detail, progress["seconds_left"])
