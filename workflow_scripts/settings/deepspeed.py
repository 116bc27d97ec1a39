"""The DeepSpeed configurations in config/deepspeed, by name."""

from errors import InputError
from files import read_json
from settings.layers import CONFIG

FOLDER = CONFIG / "deepspeed"


def read_deepspeed(name: str, key: str) -> dict:
    """The content of config/deepspeed/<name>.json.

    Args:
        key: where the name was stated, for the error message.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        raise InputError(
            f"{key}: there is no {path}; known are {', '.join(sorted(p.stem for p in FOLDER.glob('*.json')))}"
        )
    return read_json(path)
