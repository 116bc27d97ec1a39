"""Patches of transformers 5 (tested with 5.17 and 5.23).

- `deepspeed_load_checkpoint` loads checkpoints without the frozen weights. Trainer allows them only for a PeftModel
  (https://github.com/huggingface/transformers/pull/28746), but the workflow's checkpoints leave out frozen weights in
  stage 1 and in full fine-tuning too.
- `skip_first_batches` skips nothing. StepBatches starts a resumed epoch at the right step itself.
- `find_packed_sequence_indices` finds none. Batches are padded, never packed, and the search
  (https://github.com/huggingface/transformers/pull/39194) waits for the GPU at every micro batch.
"""

from pathlib import Path

import transformers.masking_utils
import transformers.trainer
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from dj2mgm.training.library_patches.deepspeed_patch import load_into_host_memory, restore_bias_corrections


def apply() -> None:
    transformers.trainer.deepspeed_load_checkpoint = _load_trained_weights_only
    transformers.trainer.skip_first_batches = _skip_no_batches
    transformers.masking_utils.find_packed_sequence_indices = _find_no_packed_sequences


def is_applied() -> bool:
    return transformers.trainer.deepspeed_load_checkpoint is _load_trained_weights_only


def _load_trained_weights_only(engine, path: str | Path, load_module_strict: bool = True) -> None:
    load_into_host_memory(engine)
    deepspeed_load_checkpoint(engine, path, load_module_strict=False)
    restore_bias_corrections(engine)


def _skip_no_batches(loader: DataLoader, steps: int) -> DataLoader:
    return loader


def _find_no_packed_sequences(position_ids) -> None:
    return None
