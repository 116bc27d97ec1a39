"""Merge of a configuration's layers: defaults ← the model's settings ← the experiment ← the command line."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import check_local_model
from dj2mgm.model_files.model_folders import check_model_folder, check_model_type, find_model, is_folder_path
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.config_files import (
    convert_values,
    list_config_names,
    locate_config_file,
    locate_existing_file,
    read_config,
    read_json_config,
)
from dj2mgm.settings.configuration import (
    Configuration,
    Experiment,
    ExperimentOnlyKeys,
    SharedKeys,
)
from dj2mgm.settings.models import (
    MgmModel,
    ModelFile,
    TinyModel,
    TransformersModel,
    check_chat_templates,
    detect_model_kind,
)
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
    check_model_type(f"model: {value}", config)
    if "vision_config" not in config:
        raise InputError(
            f"model: {value} (model_type {kind}) has no vision_config, so it takes no images; name a vision-language "
            f"model, or {IN_A_FILE} if it is the language model of an MGM"
        )


# present on every machine
EMBEDDED_DEFAULTS = {key: ExperimentOnlyKeys.model_fields[key].default for key in ("dataset", "model")}


def list_experiment_names() -> list[str]:
    """Return the names of the files in config/experiments; each is a target of `snakemake`."""
    return list_config_names("experiments")


def locate_experiment_file(name: str) -> Path:
    """Return the path of an experiment's file."""
    return locate_config_file("experiments", f"{name}.yaml")


def merge_experiment(
    name: str,
    command_line: dict,
    *extra_layers: Layer,
    model_reader: Callable[[str], tuple[ModelFile, Layer]] | None = None,
) -> Experiment:
    """Return the complete, validated configuration of one experiment.

    Args:
        name: the experiment.
        command_line: values of --config.
        extra_layers: layers that override the command line, such as the changes of a variant.
        model_reader: replacement of `read_model`, for example a cached version; each call checks the model's folders.

    Raises:
        InputError: an unknown key (with the nearest known one), a wrong type, or a file that does not exist.
    """
    defaults, file = read_default_layer(), _read_layer(locate_experiment_file(name))
    refuse_keys(file, SharedKeys.model_fields, "applies to all experiments; set it in config/config.yaml")
    own_layers = [file, build_command_line_layer(command_line), *extra_layers]
    model_name = merge([defaults, *own_layers]).get("model", ExperimentOnlyKeys.model_fields["model"].default)
    if not (isinstance(model_name, str) and has_format("path", model_name)):
        validate_settings(Configuration, merge([defaults, *own_layers]), f"experiment {name}", [defaults, *own_layers])
    model, model_settings = (model_reader or read_model)(model_name)
    layers = [defaults, model_settings, *own_layers]
    return validate_settings(Experiment, merge(layers) | {"model": model}, f"experiment {name}", layers)


def merge_shared_settings(command_line: dict) -> Configuration:
    """Return the configuration without an experiment, for the keys of several experiments."""
    layers = [read_default_layer(), build_command_line_layer(command_line)]
    return validate_settings(Configuration, merge(layers), layers[1].source, layers)


def read_default_layer() -> Layer:
    """Return config/config.yaml. A key that it lacks has the default of the settings' type."""
    layer = _read_layer(locate_config_file("config.yaml"))
    if not layer.values:
        raise InputError(f"{layer.source} is empty; it must state the default of every key")
    return layer


def build_command_line_layer(values: dict) -> Layer:
    """Return the values of --config and --configfile as a layer, with their types.

    Snakemake passes numbers, booleans and nulls inside braces as strings.
    """
    source = "the command line's --config"
    try:
        return Layer(source, convert_values(values, build_schema(Configuration)))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def restore_texts(values: dict, arguments: Iterable[str], files: Iterable[Path]) -> dict:
    """Return values with the text of those that Snakemake has read as YAML or numbers.

    A folder may be called 2024_10, `photos #2` or null.

    Args:
        values: Snakemake's configuration.
        arguments: strings of the form `key=value` after --config.
        files: files after --configfile, which the arguments override.
    """
    schema = build_schema(Configuration)
    written: dict = {}
    for file in files:
        written |= read_config(file, schema)
    on_command_line = {key: _remove_quotes(text) for key, _, text in (part.partition("=") for part in arguments)}
    written |= on_command_line
    changed_keys = {key for key, value in values.items() if isinstance(value, int | float)} & written.keys()
    changed_keys |= {key for key in on_command_line if _is_text(schema["properties"].get(key, {}), values[key])}
    return values | {key: written[key] for key in changed_keys}


def _is_text(schema: dict, value: object) -> bool:
    """Return whether a setting is a string, unless it may be null and is."""
    types = schema.get("type")
    return types == "string" or (isinstance(types, list) and "string" in types and not isinstance(value, list | None))


def _remove_quotes(text: str) -> str:
    """Return a value without the quotes that reached Snakemake, as in `--config 'dataset="007"'`."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def drop_defaults(values: dict, explicit_values: dict) -> dict:
    """Return `values` without the entries that only repeat config/config.yaml.

    Args:
        values: a configuration, such as another workflow's.
        explicit_values: values of the command line, whose entries are kept although they equal the defaults.
    """
    return _find_differences(build_command_line_layer(values).values, read_default_layer().values, explicit_values)


def _find_differences(values: dict, defaults: dict, explicit_values: dict) -> dict:
    result = {}
    for key, value in values.items():
        default, explicit_value = defaults.get(key), explicit_values.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _find_differences(value, default, explicit_value if isinstance(explicit_value, dict) else {}):
                result[key] = inner
        elif key in explicit_values or key not in defaults or value != default:
            result[key] = value
    return result


def merge(layers: list[Layer]) -> dict:
    """Merge layers; later ones win. Mappings are merged key by key, everything else is replaced.

    After a null (`lora: null`), a mapping is merged with the first layer's mapping, so it may state only some keys.
    """
    result: dict = {}
    for layer in layers:
        result = _merge_values(result, layer.values, layers[0].values)
    return result


def _read_layer(path: Path) -> Layer:
    return Layer(str(path), read_config(path, build_schema(Configuration)))


def _merge_values(old: dict, new: dict, first_values: dict) -> dict:
    result = dict(old)
    for key, value in new.items():
        defaults = first_values.get(key)
        old_value = old[key] if old.get(key) is not None else defaults
        are_mappings = isinstance(value, dict) and isinstance(old_value, dict)
        result[key] = (
            _merge_values(old_value, value, defaults if isinstance(defaults, dict) else {}) if are_mappings else value
        )
    return result
