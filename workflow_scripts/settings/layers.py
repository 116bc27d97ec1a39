"""Merging configuration layers: defaults ← the model's settings ← the experiment ← the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from errors import InputError
from settings.schema import check_layer, check_merged

CONFIG = Path("config")
ACROSS_EXPERIMENTS = (
    "report",
    "ablation",
    "lora_sweep",
    "lora_vs_full",
    "finetune_minimal",
    "attention_benchmark",
    "benchmarks",
    "challenge",
)


@dataclass(frozen=True)
class Layer:
    source: str  # what an error message calls it
    values: dict


def experiment_names() -> list[str]:
    """Every file in config/experiments is an experiment, and a target of `snakemake`."""
    return sorted(path.stem for path in (CONFIG / "experiments").glob("*.yaml"))


def merge_experiment(name: str, command_line: dict, *more: Layer) -> dict:
    """The complete, validated configuration of one experiment; its model file is under `model`.

    Args:
        more: layers after the command line: what makes a variant of the experiment.

    Raises:
        InputError: an unknown key (with the nearest known one), a wrong type, or a file that does not exist.
    """
    defaults = default_layer()
    path = CONFIG / "experiments" / f"{name}.yaml"
    file = Layer(str(path), read_config(path))
    for key in ACROSS_EXPERIMENTS:
        if key in file.values:
            raise InputError(f"{path}: {key!r} is about all experiments; set it in config/config.yaml")
    own = [file, command_line_layer(command_line), *more]
    for layer in (defaults, *own):
        check_layer(layer.source, layer.values, "config")

    chosen = merge([defaults, *own])
    model_path = named_file("models", chosen["model"], "model")
    model = read_config(model_path)
    check_merged(str(model_path), model, "assembled_model" if "assembled" in model else "model")
    model_settings = Layer(f"{model_path}, settings", model.pop("settings", {}))
    check_layer(model_settings.source, model_settings.values, "config")

    merged = merge([defaults, model_settings, *own])
    check_merged(f"experiment {name}", merged, "config")
    return merged | {"model": model | {"name": chosen["model"]}}


def merge_across(command_line: dict) -> dict:
    """What concerns several experiments: which ones the page compares, what is left out, the challenge's reference."""
    merged = merge([default_layer(), command_line_layer(command_line)])
    return {key: merged[key] for key in ACROSS_EXPERIMENTS}


def default_layer() -> Layer:
    return Layer("config/config.yaml", read_config(CONFIG / "config.yaml"))


def command_line_layer(values: dict) -> Layer:
    return Layer("the command line's --config", _typed(values))


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
    path = CONFIG / folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in (CONFIG / folder).glob("*.yaml"))
        raise InputError(f"{key}: there is no {path}; known are {', '.join(known)}")
    return path


def read_config(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except Exception as error:  # PyYAML raises errors of many types on odd values
        raise InputError(f"{path}: not valid YAML: {error or type(error).__name__}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected keys and values, found a {type(values).__name__}")
    return values


def _typed(value: Any) -> Any:
    """Values from the command line with their types: Snakemake leaves numbers, booleans and nulls in braces as text."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, str):
        try:
            scalar = yaml.safe_load(value)
        except yaml.YAMLError:
            return value
        return scalar if isinstance(scalar, bool | int | float) or value in ("null", "~") else value
    return value


def _merged(old: dict, new: dict, first: dict) -> dict:
    result = dict(old)
    for key, value in new.items():
        defaults = first.get(key)
        before = old[key] if old.get(key) is not None else defaults
        both = isinstance(value, dict) and isinstance(before, dict)
        result[key] = _merged(before, value, defaults if isinstance(defaults, dict) else {}) if both else value
    return result
