"""Changes to third-party libraries for training, one module per library.

Nothing changes on import. Entry points call `apply_library_changes`.
"""

from dj2mgm.training.library_changes import change_cpuinfo, change_transformers


def apply_library_changes() -> None:
    """Apply all changes; calling it again has no further effect."""
    change_cpuinfo.apply()
    change_transformers.apply()
