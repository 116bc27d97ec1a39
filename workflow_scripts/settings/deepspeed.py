"""The DeepSpeed configurations in config/deepspeed, by name."""

from errors import InputError
from files import FIX, read_json
from settings.layers import CONFIG

FOLDER = CONFIG / "deepspeed"


def deepspeed_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_deepspeed(name: str, key: str) -> dict:
    """The content of config/deepspeed/<name>.json.

    Args:
        key: where the name was stated, for the error message.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        raise InputError(f"{key}: there is no {path}; known are {', '.join(deepspeed_names())}")
    return read_json(path, remedy=FIX)
