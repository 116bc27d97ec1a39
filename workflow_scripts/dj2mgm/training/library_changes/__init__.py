"""Changes to third-party libraries for training, one module per library.

Nothing changes on import. Entry points call `apply_library_changes`. Other changes are in cli/snakemake_changes.py
(Snakemake), juicer/changed_data_juicer.py (Data-Juicer), evaluation/harnesses/lmms_tasks.py (lmms-eval) and
planning/meta_kernels.py (transformers, inside a context).
"""

from dj2mgm.training.library_changes import change_cpuinfo, change_transformers


def apply_library_changes() -> None:
    """Apply all changes; calling it again has no further effect."""
    change_cpuinfo.apply()
    change_transformers.apply()
