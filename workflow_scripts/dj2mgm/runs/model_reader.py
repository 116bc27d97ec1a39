"""Reader of a model: its file in config/models with the settings in it, or its folder or hub id."""

import os
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.clips import check_local_model
from dj2mgm.model_files.model_folders import check_format, check_model_folder, find_model, is_folder_path
from dj2mgm.settings.chat_templates import check_chat_templates
from dj2mgm.settings.config_files import list_config_names, locate_existing_file, read_config, read_json_config
from dj2mgm.settings.configuration import ExperimentOnlyKeys, SharedKeys
from dj2mgm.settings.models import MgmModel, ModelFile, TinyModel, TransformersModel, detect_model_kind
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.string_formats import has_format
from dj2mgm.settings.validation import Layer, refuse_keys, validate_settings

WHOLE_MODEL_KEYS = ("assembled", "transformers")  # keys of a model file that name a whole model
# keys of a model file that name folders or hub ids
MODEL_KEYS = (*WHOLE_MODEL_KEYS, "language_model", "vision_tower", "vision_tower_aux", "clip")
MGM_MODEL_TYPE = "mgm"  # `model_type` of a whole MGM
IN_A_FILE = "describe it in a config/models/<name>.yaml (docs/models.md)"


def read_model(name: str) -> tuple[ModelFile, Layer]:
    """Return a model, and its file's `settings`; a folder or hub id has no file, and no settings of its own."""
    if name not in list_config_names("models") and is_model_location(name):
        return describe_model(name, find_model(name)), Layer(name, {})
    path = locate_existing_file("models", name, "model")
    kind = detect_model_kind(read_config(path))
    model = validate_settings(kind, read_config(path, build_schema(kind)), str(path))
    check_chat_templates(str(path), {key: getattr(model, key) for key in ("pretrain_template", "template")})
    settings = Layer(f"{path}, settings", model.settings)
    updates = {
        key: os.path.normpath(find_model(getattr(model, key))) for key in WHOLE_MODEL_KEYS if hasattr(model, key)
    }
    if not model.hub_ids and not model.is_mgm and model.whole_model and not is_folder_path(model.whole_model):
        updates["hub_ids"] = [model.whole_model]  # a path in the hub's cache does not contain the id
    model = model.model_copy(update=updates).with_name(name)
    for part in (model.whole_model, *model.parts.values(), model.clip):
        if part:
            check_local_model(part)
    if isinstance(model, TinyModel):
        model = model.with_parts(_read_parts(model.foundation, path))
    forbidden = (*SharedKeys.model_fields, *ExperimentOnlyKeys.model_fields)
    refuse_keys(settings, forbidden, "is not a setting of a model; set it in config/config.yaml")
    return model, settings


def _read_parts(name: str, user: Path) -> MgmModel:
    """Return the model that a tiny model is made from.

    Args:
        name: name of its file, without suffix.
        user: file of the tiny model, for the message.
    """
    keys = read_config(locate_existing_file("models", name, f"{user}: foundation"))
    if not isinstance(keys.get("foundation"), dict):
        raise InputError(f"{user}: foundation: {name} is not trained here; name a model file that has a foundation")
    model, _ = read_model(name)
    return model


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
