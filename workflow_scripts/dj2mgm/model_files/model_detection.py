"""Models without a file in config/models: the folder or hub id of a vision-language model of transformers."""

import os
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.hub_cache import is_folder_path
from dj2mgm.model_files.model_folders import check_model_folder
from dj2mgm.model_files.model_types import check_format
from dj2mgm.settings.config_files import read_json_config
from dj2mgm.settings.models import ModelFile, TransformersModel
from dj2mgm.settings.string_formats import has_format

MGM_MODEL_TYPE = "mgm"  # `model_type` of a whole MGM
IN_A_FILE = "describe it in a config/models/<name>.yaml (docs/models.md)"


def is_model_location(value: str) -> bool:
    """Return whether a value of `model` is a folder or a hub id, not the name of a file."""
    return os.path.isdir(value) or is_folder_path(value) or has_format("repository", value)


def describe_model(value: str, folder: str) -> ModelFile:
    """Describe a model without a file of its own, which is trained in one stage.

    Args:
        value: folder or hub id, as the user states it. It becomes the model's name.
        folder: the model's folder, or the hub id if the model is not on this machine.

    Raises:
        InputError: there is no such folder, or it holds no vision-language model.
    """
    if os.path.isdir(folder):
        check_model_folder(Path(folder))
        _check_type(value, Path(folder))
    elif is_folder_path(folder):
        raise InputError(f"model: there is no folder {value}; correct the path")
    hub_ids = [] if os.path.isdir(value) or is_folder_path(value) else [value]
    model = TransformersModel(transformers=os.path.normpath(folder), hub_ids=hub_ids)
    name = os.path.normpath(value)
    # the folder ./tiny is not the model tiny
    return model.with_name(os.path.join(".", name) if os.path.isdir(value) and os.sep not in name else name)


def _check_type(value: str, folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"model: {value} holds no config.json, so it is not the folder of a model; correct the path")
    config = read_json_config(file)
    kind = config.get("model_type")
    if kind == MGM_MODEL_TYPE:
        raise InputError(f"model: {value} is a whole MGM, whose chat template no file states; {IN_A_FILE}")
    check_format(f"model: {value}", config)
    if "vision_config" not in config:
        raise InputError(
            f"model: {value} (model_type {kind}) has no vision_config, so it takes no images; name a vision-language "
            f"model, or {IN_A_FILE} if it is the language model of an MGM"
        )
