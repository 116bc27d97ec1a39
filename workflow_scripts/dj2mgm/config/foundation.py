"""The tiny models of the embedded default: trained ones come with the workflow, in config/foundation/<model>/."""

from pathlib import Path

from dj2mgm.config.reading import config_file, read_json_config

PARTS = ("clip", "convnext", "language_model")  # a folder each
SETTINGS = "settings.json"  # what they were trained with


def shipped_foundation(model: dict) -> Path | None:
    """The folder of the trained parts that come with the workflow; None where they are not of this model's settings.

    Args:
        model: keys of its file, with its name.
    """
    folder = config_file("foundation", model["name"])
    if not (folder / SETTINGS).is_file() or read_json_config(folder / SETTINGS) != model.get("foundation"):
        return None
    return folder
