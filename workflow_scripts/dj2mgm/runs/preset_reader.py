"""Reader of the presets of train_deepspeed.py, with the defaults of config.yaml."""

from dj2mgm.runs.layers import merge, read_default_layer
from dj2mgm.settings.config_files import locate_existing_file, read_config
from dj2mgm.settings.presets import PresetFile
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.training_stages import PretrainSection
from dj2mgm.settings.validation import Layer, validate_settings


def read_preset(name: str) -> tuple[PresetFile, PretrainSection]:
    """Read config/presets/<name>.yaml, and its settings with the defaults of config.yaml's `pretrain`.

    Raises:
        InputError: there is no such file, or a key of it is unknown or of the wrong type.
    """
    path = locate_existing_file("presets", name, "--preset")
    preset = validate_settings(PresetFile, read_config(path, build_schema(PresetFile)), str(path))
    preset_layer, defaults = Layer(f"{path}, training", preset.training), read_default_layer()
    layers = [Layer(defaults.source, defaults.values["pretrain"]), preset_layer]
    return preset, validate_settings(PretrainSection, merge(layers), preset_layer.source, layers)
