"""DeepSpeed configurations: config/deepspeed/<name>.json, and those that `deepspeed_configs` writes for one model."""

from collections.abc import Mapping
from pathlib import Path

from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.config_files import (
    list_config_names,
    locate_config_file,
    read_json_config,
    suggest_name,
)
from dj2mgm.settings.training_stages import AUTO, solve_batch

STAGES = range(4)  # of ZeRO
BATCH_SIZES = {  # keys that fix a batch size, and the settings of the same meaning
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}

# For each number of GPUs: micro batch, accumulation, and the file in config/deepspeed. The global batch is 32 if the
# number divides it; from 6 GPUs on, the weights are partitioned too.
BY_GPU_COUNT = {
    1: (1, 32, "zero2_offload"),
    2: (1, 16, "zero2_offload"),
    4: (1, 8, "zero2_offload"),
    6: (1, 8, "zero3_offload"),
    8: (1, 4, "zero3_offload"),
}
WITHOUT_BATCH = ("zero2_offload", "zero3", "zero3_offload")  # without batch sizes, for any number of GPUs


def list_deepspeed_names() -> list[str]:
    """Return the names of the files in config/deepspeed."""
    return list_config_names("deepspeed", ".json")


def name_config_for_gpus(gpus: int) -> str:
    """Return the name, without suffix, of the file that `deepspeed_configs` writes for a number of GPUs."""
    return f"deepspeed_{gpus}gpu"


def list_written_files() -> list[str]:
    """Return the names of all files that `deepspeed_configs` writes."""
    return [f"{name}.json" for name in (*map(name_config_for_gpus, BY_GPU_COUNT), *WITHOUT_BATCH)]


def read_deepspeed(name: str, key: str) -> dict:
    """Read and check config/deepspeed/<name>.json.

    Args:
        name: name of the file, without suffix.
        key: the setting that names it, for the message.
    """
    path = locate_config_file("deepspeed", f"{name}.json")
    names = list_deepspeed_names()
    if (stem := name.removesuffix(".json")) != name and stem in names and name not in names:
        raise InputError(f"{key}: found {name}; set {key}: {stem}, without .json")
    if name not in names:
        raise InputError(f"{key}: there is no {path}; {suggest_name(name, names)}")
    return read_deepspeed_file(path)


def read_deepspeed_file(path: Path) -> dict:
    """Read a DeepSpeed configuration and check the keys that the workflow reads or fills in."""
    config = read_json_config(path)
    stage = _read_key(config, "zero_optimization", "stage")
    if isinstance(stage, bool) or stage not in STAGES:
        raise InputError(f"{path}: zero_optimization.stage: expected 0, 1, 2 or 3, found {quote_value(stage)}")
    enabled = _read_key(config, "bf16", "enabled")
    if enabled is not False and enabled != AUTO:
        value = quote_value(enabled)
        raise InputError(f'{path}: bf16.enabled: found {value}; set "auto", because the setting precision decides it')
    enabled = _read_key(config, "fp16", "enabled")
    if enabled not in (None, False, AUTO):
        raise InputError(f"{path}: fp16.enabled: found {quote_value(enabled)}; remove fp16, which no stage trains in")
    for key in BATCH_SIZES:
        size = config.get(key, AUTO)
        if size != AUTO and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InputError(f'{path}: {key}: expected "auto" or an integer from 1, found {quote_value(size)}')
    return config


def _read_key(config: dict, section: str, key: str) -> object:
    """Return the value of a key in a section, or None if one of them is missing."""
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


def check_batch_sizes(name: str, config: dict, stage: str, settings: Mapping) -> None:
    """Raise InputError if config/deepspeed/<name>.json fixes batch sizes that contradict the settings of a stage.

    Args:
        name: name of the file, without suffix.
        config: its content.
        stage: name of the stage, for the message.
        settings: values of the stage with the keys of `solve_batch`.
    """
    path = locate_config_file("deepspeed", f"{name}.json")
    fixed_sizes = {}
    for key, size in find_fixed_sizes(config).items():
        setting = BATCH_SIZES[key]
        if (stated_size := settings[setting]) not in (AUTO, None, size):
            raise InputError(f'{path}: {key} is {size}, but {stage}.{setting} is {stated_size}; set {key}: "auto"')
        fixed_sizes[setting] = size
    if fixed_sizes:
        solve_batch(str(path), dict(settings) | fixed_sizes)


def find_fixed_sizes(config: dict) -> dict[str, int]:
    """Return the batch sizes that a configuration fixes, by its keys."""
    return {key: config[key] for key in BATCH_SIZES if config.get(key, AUTO) != AUTO}
