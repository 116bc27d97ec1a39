"""DeepSpeed configurations by number of GPUs."""

from dj2mgm.settings.training_stages import read_deepspeed, solve_batch
from dj2mgm.training.deepspeed_config import complete_deepspeed_config, with_batch

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


def name_config_for_gpus(gpus: int) -> str:
    """Return the name, without suffix, of the file that `deepspeed_configs` writes for a number of GPUs."""
    return f"deepspeed_{gpus}gpu"


def list_written_files() -> list[str]:
    """Return the names of all files that `deepspeed_configs` writes."""
    return [f"{name}.json" for name in (*map(name_config_for_gpus, BY_GPU_COUNT), *WITHOUT_BATCH)]


def build_config_for_gpus(gpus: int, hidden_size: int) -> dict:
    """Build the configuration of BY_GPU_COUNT for this number of GPUs, with its batch sizes."""
    micro, accumulation, name = BY_GPU_COUNT[gpus]
    factors = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "gpus": gpus}
    sizes = solve_batch(f"{gpus} GPUs", factors | {"global_batch_size": None})
    return with_batch(complete_deepspeed_config(read_deepspeed(name, "config"), hidden_size), sizes)
