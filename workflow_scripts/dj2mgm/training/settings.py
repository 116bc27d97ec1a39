"""Resolved settings of a training stage with what depends on this machine, and the fingerprint of a checkpoint."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import torch

from dj2mgm.model_files.model_folders import MODEL_SUFFIXES
from dj2mgm.script_modules import find_modules
from dj2mgm.settings.training_stages import AUTO, TrainingStageSettings, count_steps, find_steps, is_bf16
from dj2mgm.storage.files import compute_sha256


class TrainingSettings(TrainingStageSettings):
    """Settings of a training stage on this machine."""

    @property
    def has_auto(self) -> bool:
        """True if a setting is left to the memory plan."""
        return bool(self.deepspeed_choices) or AUTO in (self.micro_batch_size, self.activation_checkpointing)

    @property
    def bf16(self) -> bool:
        """True if training computes in bfloat16."""
        return is_bf16(self.precision, torch.cuda.is_available())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights during training."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def with_enough_steps(self, rows: int) -> Self:
        """Return settings that train a number of rows for the steps of `find_steps`."""
        steps = find_steps(self, rows)
        return self if steps == count_steps(self, rows) else self.model_copy(update={"max_steps": steps})


def compute_fingerprint(settings: TrainingSettings, digest: str) -> str:
    """Return a fingerprint of settings, and of inputs and code by their digest.

    It is equal for two runs that give the same weights except for rounding. Settings without effect on the weights are
    left out.
    """
    return f"{digest}:{settings.select_weight_settings()!r}"


def compute_input_digest(inputs: dict[str, Path]) -> str:
    """Return a digest of the stage's code and inputs, on which its weights depend in addition to its settings."""
    files = find_modules(Path(sys.argv[0]))
    for path in inputs.values():
        files += list_model_files(path) if path.is_dir() else [path]
    return compute_sha256(*files)


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a model folder: weights, configuration, tokenizer and its chat template."""
    return [file for suffix in MODEL_SUFFIXES for file in sorted(folder.rglob(f"*{suffix}"))]


def run_in_background(function: Callable, *args) -> Future:
    """Run a function in a daemon thread and return its future result."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
