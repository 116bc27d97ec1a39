"""Presets of train_deepspeed.py, config/presets/<name>.yaml."""

from dj2mgm.settings.base import Section, setting
from dj2mgm.settings.string_formats import FilePath


class PresetFile(Section):
    """A text model, its data, and changed keys of config.yaml's `pretrain`."""

    model: FilePath = setting(..., "folder or hub id")
    data: FilePath = setting(..., "jsonl of texts")
    training: dict = setting(..., "keys of config.yaml's `pretrain`")
