"""Merge of a configuration's layers: defaults ← the model's settings ← the experiment ← the command line."""

from collections.abc import Callable, Iterable
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.runs.model_reader import read_model
from dj2mgm.settings.config_files import convert_values, list_config_names, locate_config_file, read_config
from dj2mgm.settings.configuration import (
    Configuration,
    Experiment,
    ExperimentOnlyKeys,
    SharedKeys,
    build_configuration_model,
    build_experiment_model,
)
from dj2mgm.settings.models import ModelFile
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.string_formats import has_format
from dj2mgm.settings.validation import Layer, refuse_keys, validate_settings

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
        validate_settings(
            build_configuration_model(), merge([defaults, *own_layers]), f"experiment {name}", [defaults, *own_layers]
        )
    model, model_settings = (model_reader or read_model)(model_name)
    layers = [defaults, model_settings, *own_layers]
    return validate_settings(build_experiment_model(), merge(layers) | {"model": model}, f"experiment {name}", layers)


def merge_shared_settings(command_line: dict) -> Configuration:
    """Return the configuration without an experiment, for the keys of several experiments."""
    layers = [read_default_layer(), build_command_line_layer(command_line)]
    return validate_settings(build_configuration_model(), merge(layers), layers[1].source, layers)


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
        return Layer(source, convert_values(values, build_schema(build_configuration_model())))
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
    schema = build_schema(build_configuration_model())
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
    return Layer(str(path), read_config(path, build_schema(build_configuration_model())))


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
