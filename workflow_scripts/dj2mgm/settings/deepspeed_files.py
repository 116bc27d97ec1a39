"""DeepSpeed configurations, config/deepspeed/<name>.json."""

from dj2mgm.errors import InputError
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_json_config, suggest_name


def list_deepspeed_names() -> list[str]:
    """Return the names of the files in config/deepspeed."""
    return list_config_names("deepspeed", ".json")


def read_deepspeed(name: str, key: str) -> dict:
    """Read config/deepspeed/<name>.json.

    Args:
        name: name of the file, without suffix.
        key: the setting that names it, for the message.
    """
    path = locate_config_file("deepspeed", f"{name}.json")
    if name not in (names := list_deepspeed_names()):
        raise InputError(f"{key}: there is no {path}; {suggest_name(name, names)}")
    return read_json_config(path)


def find_fixed_sizes(config: dict) -> list[str]:
    """Return the keys by which a configuration fixes the micro batch."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return [key for key in keys if config.get(key, "auto") != "auto"]
