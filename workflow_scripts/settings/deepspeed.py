"""The DeepSpeed configurations in config/deepspeed, by name."""

from errors import InputError
from settings.layers import CONFIG, names_in
from settings.reading import read_json_config

FOLDER = CONFIG / "deepspeed"


def deepspeed_names() -> list[str]:
    return names_in(FOLDER, ".json")


def read_deepspeed(name: str, key: str) -> dict:
    """The content of config/deepspeed/<name>.json.

    Args:
        key: where the name was stated, for the error message.
    """
    path = FOLDER / f"{name}.json"
    if name not in (known := deepspeed_names()):
        raise InputError(f"{key}: there is no {path}; known are {', '.join(known)}")
    return read_json_config(path)
