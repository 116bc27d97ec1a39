"""Merging configuration layers: defaults ← the model's settings ← the experiment ← the command line; and presets of
train_deepspeed.py."""

import os
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.config.chat_templates import check_chat_templates
from dj2mgm.config.clips import check_local_model
from dj2mgm.config.reading import (
    cached_snapshot,
    config_file,
    names_folder,
    names_in,
    plain_values,
    read_config,
    suggestion,
)
from dj2mgm.config.schema import check_layer, check_merged, schema_of
from dj2mgm.errors import InputError

# of a model file: folders or hub ids
PARTS = ("assembled", "transformers", "language_model", "vision_tower", "vision_tower_aux", "clip_score")
ACROSS_EXPERIMENTS = (
    "report",
    "format",
    "export",
    "publish",
    "provenance",
    "crate",
    "crate_folders",
    "results",
    "overwrite",
    "decontaminate",
    "ablation",
    "lora_sweep",
    "lora_vs_full",
    "finetune_minimal",
    "attention_benchmark",
    "foundation",
    "trusted_recipes",
    "benchmarks",
    "challenge",
    "evaluations",
    "evaluation_data",
)
OF_AN_EXPERIMENT = ("dataset", "model", "recipe", "without", "seeds", "description")  # and of no model


@dataclass(frozen=True)
class Layer:
    source: str  # what an error message calls it
    values: dict


def experiment_names() -> list[str]:
    """Every file in config/experiments is an experiment, and a target of `snakemake`."""
    return names_in("experiments")


def experiment_file(name: str) -> Path:
    return config_file("experiments", f"{name}.yaml")


def merge_experiment(name: str, command_line: dict, *more: Layer) -> dict:
    """The complete, validated configuration of one experiment; its model file is under `model`.

    Args:
        more: layers after the command line: what makes a variant of the experiment.

    Raises:
        InputError: an unknown key (with the nearest known one), a wrong type, or a file that does not exist.
    """
    defaults = default_layer()
    file = _layer(experiment_file(name))
    _refuse_keys(file, ACROSS_EXPERIMENTS, "is about all experiments; set it in config/config.yaml")
    own = [file, command_line_layer(command_line), *more]
    for layer in own:
        check_layer(layer.source, layer.values, "config")

    model, model_settings = _read_model(merge([defaults, *own])["model"])
    merged = merge([defaults, model_settings, *own])
    check_merged(f"experiment {name}", merged, "config")
    return merged | {"model": model}


def merge_shared_settings(command_line: dict) -> dict:
    """What concerns several experiments: which ones the page compares, what is left out, the challenge's reference."""
    given = command_line_layer(command_line)
    check_layer(given.source, given.values, "config")
    merged = merge([default_layer(), given])
    check_merged(given.source, merged, "config")
    for name in merged["challenge"]["scores"]:
        if name not in merged["benchmarks"]:
            raise InputError(
                f"challenge.scores.{name}: the key 'benchmarks.{name}' is missing; name its files, or null"
            )
    return {key: merged[key] for key in ACROSS_EXPERIMENTS}


def default_layer() -> Layer:
    """config/config.yaml, which must state every key."""
    layer = _layer(config_file("config.yaml"))
    if not layer.values:
        raise InputError(f"{layer.source} is empty; it must state the default of every key")
    check_merged(layer.source, layer.values, "config")
    return layer


def command_line_layer(values: dict) -> Layer:
    """What --config and --configfile say. Snakemake leaves numbers, booleans and nulls in braces as text."""
    source = "the command line's --config"
    try:
        return Layer(source, plain_values(values, schema_of("config")))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def without_defaults(values: dict, stated: dict) -> dict:
    """`values` without what only repeats config/config.yaml.

    Args:
        stated: the values that count although they are those of the defaults.
    """
    return _differences(command_line_layer(values).values, default_layer().values, stated)


def _differences(values: dict, defaults: dict, stated: dict) -> dict:
    result = {}
    for key, value in values.items():
        default, own = defaults.get(key), stated.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _differences(value, default, own if isinstance(own, dict) else {}):
                result[key] = inner
        elif key in stated or key not in defaults or value != default:
            result[key] = value
    return result


def merge(layers: list[Layer]) -> dict:
    """Later layers win; mappings are merged key by key, everything else is replaced.

    A mapping after a null (`lora: null`) is merged with the first layer's, so that a part of it is enough.
    """
    result: dict = {}
    for layer in layers:
        result = _merged(result, layer.values, layers[0].values)
    return result


def named_file(folder: str, name: str, key: str) -> Path:
    """config/<folder>/<name>.yaml, or an error that lists what there is."""
    path = config_file(folder, f"{name}.yaml")
    if name not in (known := names_in(folder)):
        raise InputError(f"{key}: there is no {path}; {suggestion(name, known)}")
    return path


def _layer(path: Path) -> Layer:
    return Layer(str(path), read_config(path, schema_of("config")))


def _read_model(name: str) -> tuple[dict, Layer]:
    """A model file's own keys, and its `settings`."""
    path = named_file("models", name, "model")
    keys = read_config(path)
    kind = next((f"{key}_model" for key in ("assembled", "transformers", "tiny") if key in keys), "model")
    model = read_config(path, schema_of(kind))
    check_merged(str(path), model, kind)
    check_chat_templates(str(path), model)
    settings = Layer(f"{path}, settings", model.pop("settings", {}))
    for key in {"assembled", "transformers"} & model.keys():
        model[key] = os.path.normpath(find_model(model[key]))
    for part in (model[key] for key in PARTS if key in model):
        check_local_model(part)
    if kind == "tiny_model":
        model |= _parts_of(model["foundation"], path)
    _refuse_keys(settings, (*ACROSS_EXPERIMENTS, *OF_AN_EXPERIMENT), "is not a model's; set it in config/config.yaml")
    check_layer(settings.source, settings.values, "config")
    return model | {"name": name}, settings


def find_model(part: str) -> str:
    """The folder of a model: where the hub's cache on this machine has a hub id, and what is named otherwise."""
    if names_folder(part) or os.path.isdir(part):
        return part
    return str(cached_snapshot(part, "models") or part)


def _parts_of(name: str, asks: Path) -> dict:
    """The model file that a tiny model is made of, and its parts."""
    keys = read_config(named_file("models", name, f"{asks}: foundation"))
    if not isinstance(keys.get("foundation"), dict):
        raise InputError(f"{asks}: foundation: {name} is not trained here; name a model file that has a foundation")
    foundation, _ = _read_model(name)
    return {"foundation": foundation} | {part: foundation[part] for part in ("language_model", "vision_tower")}


def _refuse_keys(layer: Layer, keys: tuple[str, ...], remedy: str) -> None:
    for key in keys:
        if key in layer.values:
            raise InputError(f"{layer.source}: {key!r} {remedy}")


def _merged(old: dict, new: dict, first: dict) -> dict:
    result = dict(old)
    for key, value in new.items():
        defaults = first.get(key)
        before = old[key] if old.get(key) is not None else defaults
        both = isinstance(value, dict) and isinstance(before, dict)
        result[key] = _merged(before, value, defaults if isinstance(defaults, dict) else {}) if both else value
    return result


@dataclass(frozen=True)
class Preset:
    model: str  # folder or hub id
    data: str  # jsonl of texts
    training: dict  # the keys of config.yaml's `pretrain`


def read_preset(name: str) -> Preset:
    """
    Raises:
        InputError: there is no such file, or a key of it is unknown or of the wrong type.
    """
    path = named_file("presets", name, "--preset")
    preset = read_config(path, schema_of("preset"))
    check_merged(str(path), preset, "preset")
    training = Layer(f"{path}, training", {"pretrain": preset["training"]})
    check_layer(training.source, training.values, "config")
    return Preset(preset["model"], preset["data"], merge([default_layer(), training])["pretrain"])
