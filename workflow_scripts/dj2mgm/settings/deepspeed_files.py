"""DeepSpeed configurations: config/deepspeed/<name>.json, and those that `deepspeed_configs` writes for one model."""

from dj2mgm.errors import InputError
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_json_config, suggest_name

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
