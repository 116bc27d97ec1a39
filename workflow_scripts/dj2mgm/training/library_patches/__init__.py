"""Patches of third-party libraries for training, one module per library.

Nothing changes on import. Entry points call `apply_library_patches`. Other patches are in cli/console.py
(Snakemake), juicer/patched_data_juicer.py (Data-Juicer), features/lmms_eval/lmms_tasks.py (lmms-eval) and
planning/meta_kernels.py (transformers, inside a context).
"""

from dj2mgm.training.library_patches import deepspeed_patch, transformers_patch


def apply_library_patches() -> None:
    """Apply all patches; calling it again has no further effect."""
    deepspeed_patch.apply()
    transformers_patch.apply()
