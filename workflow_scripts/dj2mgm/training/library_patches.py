"""Patches of third-party libraries for training: DeepSpeed 0.19.8, and transformers 5 (tested with 5.17 and 5.23).

Nothing changes on import. Entry points call `apply_library_patches`. Other patches are in cli/console.py
(Snakemake), juicer/patched_data_juicer.py (Data-Juicer), features/lmms_eval/lmms_tasks.py (lmms-eval) and
planning/meta_kernels.py (transformers, inside a context).

DeepSpeed:

- `get_cpu_info` of py-cpuinfo 9.0 starts a Python process each time, and DeepSpeed calls it three times for its
  optimizer on the CPU (deepspeed/ops/adam/cpu_adam.py, deepspeed/ops/op_builder/builder.py). Its result is kept.
- ZeRO-1 and ZeRO-2 in bf16 do not wait for the gradient norm, so that the host launches the next step's first kernels
  while the GPU still computes. `mask_nan_or_inf_with_val_inplace` copies a number to the GPU, and
  `unscale_and_clip_grads` reads the norm to replace an invalid one by infinity, which `combine_grad_norm_groups` has
  done already.
- Engines are changed before they load a checkpoint, by the other functions.

transformers:

- `deepspeed_load_checkpoint` loads checkpoints without the frozen weights. Trainer allows them only for a PeftModel
  (https://github.com/huggingface/transformers/pull/28746), but the workflow's checkpoints leave out frozen weights in
  stage 1 and in full fine-tuning too.
- `skip_first_batches` skips nothing. StepBatches starts a resumed epoch at the right step itself.
- `find_packed_sequence_indices` finds none. Batches are padded, never packed, and the search
  (https://github.com/huggingface/transformers/pull/39194) waits for the GPU at every micro batch.
"""

from functools import cache
from pathlib import Path

import cpuinfo
import torch
import transformers.masking_utils
import transformers.trainer
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import stage_1_and_2
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from dj2mgm.training.arguments import repeat_products_of_betas


def apply_library_patches() -> None:
    """Apply all patches; calling it again has no further effect."""
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mask_invalid
    stage_1_and_2.DeepSpeedZeroOptimizer.unscale_and_clip_grads = _unscale_and_clip
    transformers.trainer.deepspeed_load_checkpoint = _load_trained_weights_only
    transformers.trainer.skip_first_batches = _skip_no_batches
    transformers.masking_utils.find_packed_sequence_indices = _find_no_packed_sequences


def _mask_invalid(norm: torch.Tensor, device: torch.device | None = None) -> None:
    """Replace, in place, a norm that is not finite by -1, DeepSpeed's sign of an invalid norm."""
    norm.masked_fill_(~norm.isfinite(), -1.0)


def _unscale_and_clip(
    self: stage_1_and_2.DeepSpeedZeroOptimizer, flat_gradients: list[torch.Tensor], total_norm: torch.Tensor | None
) -> None:
    """Divide gradients, in place, by the loss scale, and by the factor by which their norm exceeds `clip_grad`."""
    divisor = self.loss_scale
    if self.clip_grad > 0:
        divisor = torch.clamp((total_norm / self.loss_scale + 1e-6) / self.clip_grad, min=1.0) * self.loss_scale
    elif divisor == 1:
        return
    for gradient in flat_gradients:
        gradient.mul_(1.0 / divisor)


def load_into_host_memory(engine) -> None:
    """Load checkpoint files with map_location="cpu".

    DeepSpeed passes a function as map_location, which torch.load refuses for torchao's 8-bit optimizer states.
    """
    load = engine.checkpoint_engine.load
    engine.checkpoint_engine.load = lambda file, map_location=None: load(file, map_location="cpu")


def restore_bias_corrections(engine) -> None:
    """Restore the bias corrections of DeepSpeed's CPU Adam, which checkpoints do not contain."""
    if isinstance(engine.basic_optimizer, DeepSpeedCPUAdam):
        repeat_products_of_betas(engine.basic_optimizer)


def are_patches_applied() -> bool:
    return transformers.trainer.deepspeed_load_checkpoint is _load_trained_weights_only


def _load_trained_weights_only(engine, path: str | Path, load_module_strict: bool = True) -> None:
    load_into_host_memory(engine)
    deepspeed_load_checkpoint(engine, path, load_module_strict=False)
    restore_bias_corrections(engine)


def _skip_no_batches(loader: DataLoader, steps: int) -> DataLoader:
    return loader


def _find_no_packed_sequences(position_ids) -> None:
    return None
