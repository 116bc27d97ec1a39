"""Trained parts of the tiny models that come with the workflow, in config/foundation/<model>/."""

from pathlib import Path

from dj2mgm.settings.config_files import locate_config_file, read_json_config
from dj2mgm.settings.models import ModelFile

FOUNDATION_PARTS = ("clip", "convnext", "language_model")  # a folder each
FOUNDATION_SETTINGS = "settings.json"  # settings of their training


def find_shipped_foundation(model: ModelFile) -> Path | None:
    """Return the folder of the trained parts that come with the workflow.

    None if there are none, or if they were trained with other settings than the model's.
    """
    folder = locate_config_file("foundation", model.name)
    if model.trained_parts is not model or not (folder / FOUNDATION_SETTINGS).is_file():
        return None
    return folder if read_json_config(folder / FOUNDATION_SETTINGS) == model.foundation.model_dump() else None
