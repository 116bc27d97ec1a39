"""Presets of train_deepspeed.py: config/presets over the training keys of config/config.yaml."""

from dataclasses import dataclass

from settings.layers import Layer, default_layer, merge, named_file
from settings.reading import read_config
from settings.schema import check_layer, check_merged, schema_of


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
